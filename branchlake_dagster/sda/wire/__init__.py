"""The bytes that sensors send: radar datagrams, optical items of JSON, frames of inter-satellite links."""
