"""The bench: what each technique really buys, measured on this machine.

`statistics` says what may be claimed and why; `rows` which techniques are measured; `session` measures them, each
measurement (`measure`) in a fresh process (`processes`), and keeps every one on disk (`state`); `result` turns the
measurements into medians, intervals and verdicts; `tables`, `html` and `publish` show them. `guide` repeats the
experiment of Hugging Face's single-GPU guide, `evidence` sets one technique against its baseline at equal seconds, and
`compare` sets finished runs side by side.
"""
