"""The command line. It speaks only HTTP and knows no domain; imports inside commands keep it quick to start."""
