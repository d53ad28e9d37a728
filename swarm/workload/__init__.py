"""Packing of documents into microbatches of equal cost, cost model of a visit, and split between devices."""
