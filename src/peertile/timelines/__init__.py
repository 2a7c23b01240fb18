"""Timelines of a run: what each rank did and when, as a trace file, a picture and a table."""
