"""What we use of libraries beyond what they export: one module per library, each use with its reason.

Nothing else in the package names a library's private module or attribute.
"""
