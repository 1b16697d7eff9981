"""Any agent as a producer: an OpenAI-compatible endpoint that records what its model said.

An agent that is given another base URL asks a vLLM or SGLang server through it. Every turn is kept
token by token under its run; told the reward, the run becomes canonical trajectories.
"""
