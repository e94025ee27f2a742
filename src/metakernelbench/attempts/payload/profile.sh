# Read by the agent's login shell: its tools, and the clock in its prompt.
export PATH="${MKB_ROOT:-}/task/bin:${MKB_PYTHON:-/opt/venv/bin}:$PATH"

_time_left() {
  local start budget left
  read -r start budget 2>/dev/null < "${MKB_ROOT:-}/mailbox/clock" || return 0
  left=$((start + budget - $(date +%s)))
  ((left > 0)) || left=0
  printf '[%d:%02d left] ' $((left / 60)) $((left % 60))
}

PS1='$(_time_left)\w\$ '
PS2='> '
unset PROMPT_COMMAND
