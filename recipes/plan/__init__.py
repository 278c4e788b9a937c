"""What a run will take, from outside: memory and seconds of each phase of a step, before anything is loaded. No run imports it.

`plan` reads a recipe's options and data, `forecast` computes and names options that fit. See docs/plan.md.
"""
