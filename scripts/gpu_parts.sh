# shellcheck shell=bash
# Source this after scripts/shared_gpu.sh: checks that leave a line each in a table, and their logs.
#
#   RESULTS    folder for logs and the table
# What it sources defines a function part_NAME for each part, and ends with run_parts.

failed=0
mkdir -p "$RESULTS"

# row VERDICT NAME START LOG: one line with what the log says last; any verdict but ok is a failure
row() {
  [[ $1 == ok ]] || failed=1
  printf '%-10s %-24s %4d s  %s\n' "$1" "$2" $((SECONDS - $3)) \
    "$(grep -v '^$' "$4" | tail -n 1 | cut -c1-150)" | tee -a "$RESULTS/table.txt"
}

# check NAME LIMIT_S COMMAND...: run it
check() {
  local name=$1 limit_s=$2 start=$SECONDS verdict=ok
  local log=$RESULTS/${name// /_}.log
  shift 2
  timeout -k 5 "$limit_s" "$@" >"$log" 2>&1 || verdict="FAIL ($?)"
  # pytest is content where it skipped every test
  ! tail -n 1 "$log" | grep -qE '^(=+ )?[0-9]+ skipped' || verdict="FAIL (none ran)"
  row "$verdict" "$name" "$start" "$log"
}

# beside FUNCTION WORD...: a check, or several, at the same time as others; meet waits for them
pids=()
beside() {
  (
    failed=0
    "$@"
    exit "$failed"
  ) &
  pids+=("$!")
}
meet() {
  local pid
  for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
  done
  pids=()
}

# need_mps PART: start MPS; where it does not start, the part has failed
need_mps() {
  local log="$RESULTS/mps.log"
  start_mps >"$log" 2>&1 && return
  echo "MPS did not start: $(tail -n 1 "$log")" >>"$log"
  row FAIL "$1" "$SECONDS" "$log"
  return 1
}

# run_parts NAMES PART...: run them, once all are known; NAMES are all there are. Ends the script.
run_parts() {
  local part names=$1
  shift
  for part in "$@"; do
    if ! declare -F "part_$part" >/dev/null; then
      echo "no part is called $part; parts: $names"
      exit 2
    fi
  done
  : >"$RESULTS/table.txt"
  for part in "$@"; do
    "part_$part"
  done
  exit "$failed"
}
