"""The anchor of a module: its layout as one vector, hashes, storage, and the outer optimizer's step."""
