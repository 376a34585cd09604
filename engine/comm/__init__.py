"""How ranks add up partial sums. No layer asks for the number of ranks; the communicator knows."""
