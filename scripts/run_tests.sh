#!/usr/bin/env bash
# All tests but the long ones, in two runs: first what shares the machine well, WORKERS at once, then
# alone what measures rates and times, or breaks whole stacks midway. Arguments go to pytest; one that is a path
# makes it one plain run of that.
set -uo pipefail
cd "$(dirname "$0")/.."
pytest=("${BIN:-.venv/bin}/python" -m pytest -m "not slow")
workers=${WORKERS:-2}
alone=(
	tests/bench/test_gateway.py
	tests/bench/test_wan.py
	tests/bench/test_wanlink.py
	tests/e2e/test_cancel.py
	tests/e2e/test_deaths.py
	tests/e2e/test_exact_hybrid.py
	tests/e2e/test_faults.py
	tests/e2e/test_rubbish.py
	tests/e2e/test_up_once.py
	tests/prfaas/testing/test_link.py
	tests/prfaas/testing/test_link_process.py
	tests/remote_prefill
)

for word in "$@"; do
	if [ -e "${word%%::*}" ]; then
		exec "${pytest[@]}" "$@"
	fi
done

"${pytest[@]}" -n "$workers" --dist loadfile "${alone[@]/#/--ignore=}" "$@"
first=$?
"${pytest[@]}" "$@" "${alone[@]}"
second=$?

# 5: arguments such as `-k name` left nothing to run, which one of the two may say.
[ $first = 5 ] && exit $second
[ $second = 5 ] && exit $first
exit $((first > second ? first : second))
