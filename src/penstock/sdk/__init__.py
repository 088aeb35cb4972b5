"""The client library: typed calls to the API, blocking and asynchronous, from one description of each operation."""
