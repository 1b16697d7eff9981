"""Where a plane's processes run: its folders on a node, the embedded child, and Ray actors."""
