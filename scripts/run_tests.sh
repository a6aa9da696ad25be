#!/usr/bin/env bash
# All tests but the long ones, in two runs: first what shares the machine well, WORKERS at once, then
# alone what measures rates and speeds, or chooses by them. Arguments go to pytest; one that is a path
# makes it one plain run of that. With RETRY=N up to N tests that failed are run once more at the end, alone, and
# named in either case: on a machine that others use too, a test may lose a race that it does not lose alone.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${BIN:-.venv/bin}/python
cache=build/pytest-cache
pytest=("$python" -m pytest -m "not slow" -o "cache_dir=$cache")
workers=${WORKERS:-2}
# Where it is set, each of the hundreds of processes that tests start would compile our modules anew.
unset PYTHONDONTWRITEBYTECODE
alone=(
	tests/bench/test_wan.py
	tests/bench/test_wanlink.py
	tests/e2e/test_lossy.py
	tests/e2e/test_up_once.py
	tests/prfaas/testing/test_link.py
	tests/prfaas/testing/test_link_process.py
)

for word in "$@"; do
	if [ -e "${word%%::*}" ]; then
		exec "${pytest[@]}" "$@"
	fi
done

rm -rf "$cache"
"${pytest[@]}" -n "$workers" --dist loadscope --no-loadscope-reorder "${alone[@]/#/--ignore=}" "$@"
first=$?
"${pytest[@]}" "$@" "${alone[@]}"
second=$?

# 5: arguments such as `-k name` left nothing to run, which one of the two may say.
[ $first = 5 ] && first=$second
[ $second = 5 ] && second=$first
worse=$((first > second ? first : second))
[ $worse = 1 ] && [ "${RETRY:-0}" -gt 0 ] || exit $worse

failed=$("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
	"$cache/v/cache/lastfailed") || exit $worse
if [ "$(wc -l <<<"$failed")" -gt "$RETRY" ]; then
	echo "more than $RETRY tests failed: none is run again"
	exit $worse
fi
"${pytest[@]}" --last-failed --last-failed-no-failures none
again=$?
printf 'run once more, %s:\n%s\n' "$([ $again = 0 ] && echo 'passed alone' || echo 'failed again')" "$failed"
exit $again
