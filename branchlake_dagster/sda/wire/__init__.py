"""Encode and decode sensor messages: radar datagrams, optical JSON items, link frames."""
