"""The HTTP door of Palisade: routes, identity and the table of errors. Nothing in `rag` knows of it."""
