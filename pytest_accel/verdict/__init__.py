"""The outcomes of all ranks to one verdict for each phase of a test, and its text."""
