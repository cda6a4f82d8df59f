"""`branchlake doctor`: every configured address, version and permission, and what to do."""
