"""Commands that find out what is wrong: with a plane, with this machine."""
