"""Upserts of Arrow rows without a JVM: whether PyIceberg may do one, which files it reads, and the write."""
