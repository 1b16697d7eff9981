"""The drop-in beside the package it stands in for, and under the programs that use that."""
