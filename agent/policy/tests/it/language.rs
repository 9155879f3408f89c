//! The language of policies, its error messages, and its limits.
#![allow(clippy::expect_used, clippy::panic, reason = "a panic in a test is its report")]

use mainstay_policy::{Decided, LIMITS, Policy, incidents};
use mainstay_recovery::policy::Rung;

const KILL: &str = "[[incident]]\nname = 'a kill'\ncause = { kind = 'signal', signal = 9 }\nstep = 7\n";

fn decide(text: &str) -> Result<Decided, String> {
    let policy = Policy::parse("mine.star", text).map_err(|problem| problem.to_string())?;
    let incidents = incidents::read(KILL).expect("a table");
    policy
        .decide(&incidents[0].settings, incidents[0].case(), &|| false)
        .map_err(|problem| problem.to_string())
}

/// The value of an expression as text.
fn value(expression: &str) -> String {
    let text =
        format!("X = [3, 1, 2]\ndef decide(case):\n    return decision('stop', 0, repr({expression}))\n");
    decide(&text).map_or_else(|problem| problem, |decided| decided.advice.expect("a decision").why)
}

#[test]
fn expressions_have_their_meaning_in_starlark() {
    // Python gives the same results, except for struct(), and for items() and type(), which return a list and a
    // string here.
    for (expression, expected) in [
        ("1 + 2 * 3 - 4 // 3", "6"),
        ("-7 // 2, -7 % 3, 7 % -3, 7 / 2", "(-4, 2, -2, 3.5)"),
        ("1 == 1.0 and not False or None", "True"),
        ("'a' + 'b' * 3", "\"abbb\""),
        ("[x * x for x in range(5) if x % 2]", "[1, 9]"),
        ("[a + b for a in 'x y'.split() for b in ['1', '2']]", "[\"x1\", \"x2\", \"y1\", \"y2\"]"),
        ("{k: v for k, v in zip(['a', 'b'], [1, 2])}", "{\"a\": 1, \"b\": 2}"),
        ("sorted(X), sorted(X, reverse = True), reversed(X)", "([1, 2, 3], [3, 2, 1], [2, 1, 3])"),
        ("X[0], X[-1], X[1:], X[:-1], 'hello'[1:3]", "(3, 2, [1, 2], [3, 1], \"el\")"),
        ("min(X), max(4, 2.5), len('äö'), abs(-3)", "(1, 4, 2, 3)"),
        ("'{} {} {n} {{}}'.format(1, 2, n = 'z')", "\"1 2 z {}\""),
        ("'b' in {'b': 1}, 4 not in X, 'ell' in 'hello'", "(True, True, True)"),
        ("1 if X else 2", "1"),
        ("[i for i, x in enumerate(X) if x > 1]", "[0, 2]"),
        ("', '.join(['a', 'b']), 'a-b'.replace('-', '+')", "(\"a, b\", \"a+b\")"),
        ("{'a': 1}.get('b', 9), {'a': 1}.items()", "(9, [(\"a\", 1)])"),
        ("struct(a = 1, b = 'x').b, hasattr(struct(a = 1), 'b')", "(\"x\", False)"),
        ("int(2.9), float('1.5'), str(1.0), bool([]), type(1)", "(2, 1.5, \"1.0\", False, \"int\")"),
        ("[1, 2] < [1, 3], 'a' < 'b', 2 > 1.5", "(True, True, True)"),
        ("any([0, 1]), all([1, 0])", "(True, False)"),
    ] {
        assert_eq!(value(&format!("({expression})")), expected, "{expression}");
    }
}

#[test]
fn a_field_that_was_renamed_is_found_by_its_former_name_with_a_warning() {
    let text = "def decide(case):\n    if case.host.sick and case.seen.heard_by == 3:\n        return decision('stop', 0, 'both')\n";
    let policy = Policy::parse("mine.star", text).expect("it is sound");
    let warnings: Vec<String> = policy.warnings().iter().map(ToString::to_string).collect();
    assert_eq!(
        warnings,
        [
            "mine.star:2:18: `sick` is now called `unhealthy`: the former name works until 0.2.0",
            "mine.star:2:37: `heard_by` is now called `answered_by`: the former name works until 0.2.0",
        ]
    );
    for (component, hosts) in [("sick", "heard_by"), ("unhealthy", "answered_by")] {
        let table = format!("{KILL}{component} = [{{ name = 'gpu.0' }}]\nseen = {{ {hosts} = 3 }}\n");
        let incidents = incidents::read(&table).expect("a table");
        let decided =
            policy.decide(&incidents[0].settings, incidents[0].case(), &|| false).expect("a decision");
        assert_eq!(decided.advice.expect("advice").why, "both", "{table}");
    }
    let now = text.replace("sick", "unhealthy").replace("heard_by", "answered_by");
    assert_eq!(Policy::parse("mine.star", &now).expect("it is sound").warnings(), []);
}

#[test]
fn statements_loops_and_functions_work() {
    let text = "
LIMIT = 3

def count(items, least = 0):
    found = 0
    for item in items:
        if item < least:
            continue
        elif found >= LIMIT:
            break
        found += 1
    return found

def decide(case):
    ranks = {}
    ranks['a'] = 1
    ranks['a'] += 1
    words = []
    words.append('x')
    first, (second, third) = 1, (2, 3)
    if case.verdict.cause.kind == 'signal' and case.verdict.cause.signal == 9:
        return decision(
            action = 'restart_in_job',  # all of them
            after = 1.5,
            why = '{} {} {} {}'.format(count(range(10), least = 2), ranks['a'], words, first + second + third),
        )
";
    let advice = decide(text).expect("it is sound").advice.expect("a decision");
    assert_eq!((advice.rung, advice.after.as_seconds()), (Some(Rung::All), 1.5));
    assert_eq!(advice.why, "3 2 [\"x\"] 6");
}

#[test]
fn a_policy_that_returns_none_leaves_the_failure_to_the_built_in_policy() {
    assert_eq!(decide("def decide(case):\n    pass\n").expect("sound").advice, None);
}

#[test]
fn errors_name_the_place_and_the_fix() {
    let body = |line: &str| format!("def decide(case):\n    {line}\n");
    for (text, reported) in [
        (String::new(), "mine.star: there is no function decide(case), which is called for each failure"),
        (
            "def decide(a, b):\n    pass\n".into(),
            "mine.star:1:1: decide takes one argument, the case, and not 2",
        ),
        (body("while True: pass"), "mine.star:2:5: there is no `while`: loop over a list or a range"),
        (
            body("return case.verdct"),
            "mine.star:2:16: there is no field verdct; there are verdict, past, earlier, exit, lived, reached, committed, host, seen, spares, job",
        ),
        (
            body("return 7"),
            "mine.star:2:5: decide() returned an int; it returns decision(action, after, why), or None to leave it to the built-in policy",
        ),
        (
            body("return decision('restart', 0, 'x')"),
            "mine.star:2:20: action: there is no \"restart\"; there are restart_in_process, respawn_ranks, respawn_host, \
             restart_in_job, replace_host, shrink, hand_back, stop, wait",
        ),
        (
            body("return decision('stop', '5s', 'x')"),
            "mine.star:2:20: after: a number of seconds is expected, and it is a string",
        ),
        (
            body("return decision('stop', -1, 'x')"),
            "mine.star:2:20: after: -1 is not a time to wait; it is in seconds, from 0 to 3600",
        ),
        (body("return decision('stop')"), "mine.star:2:20: decision(): why is missing"),
        (
            body("return decision('stop', why = 3)"),
            "mine.star:2:20: why: a sentence for the person on call is expected, and it is an int",
        ),
        (body("x = 1 +"), "mine.star:2:12: a value is missing before the end of the line"),
        (body("return unknown"), "mine.star:2:12: there is no unknown"),
        (
            body("return 'a' + 1"),
            "mine.star:2:16: a string and an int cannot be joined; write str(…) around it, or use \"…{}\".format(…)",
        ),
        (body("return 1 / 0"), "mine.star:2:14: division by zero"),
        (
            body("case.past.append(1)"),
            "mine.star:2:14: this cannot be changed: it was made outside of the functions; make a copy with list(…) or dict(…)",
        ),
        ("X = 1\n\tY = 2\n".into(), "mine.star:2:1: indent with spaces, not with tabs"),
        (
            "if True:\n    pass\n".into(),
            "mine.star:1:1: at the top level there are only constants and functions",
        ),
    ] {
        assert_eq!(decide(&text).expect_err(&text), reported, "{text}");
    }
}

#[test]
fn endless_deep_and_huge_policies_end_with_an_error() {
    let function = |body: &str| format!("def decide(case):\n{body}\n");
    for (text, reported) in [
        (function("    for a in range(1000000000000):\n        pass"), "too much memory"),
        (
            function(
                "    for a in range(1000):\n        for b in range(1000):\n            for c in range(1000):\n                pass",
            ),
            "too m",
        ),
        (function("    return decide(case)"), "decide calls itself"),
        (
            "def a(x):\n    return b(x)\ndef b(x):\n    return a(x)\ndef decide(case):\n    return a(1)\n"
                .into(),
            "a calls itself",
        ),
        (function("    x = 'a' * 1000000000000"), "too much memory"),
        (function("    x = [0] * 1000000000000"), "too much memory"),
        (function("    x = 'ab'\n    for i in range(100):\n        x = x + x"), "too much memory"),
        (
            function("    x = []\n    for i in range(100):\n        x = [x, x]\n    return repr(x)"),
            "nested too deeply",
        ),
        (function("    x = []\n    x.append(x)\n    return x == [x]"), "nested too deeply"),
        (
            function("    x = []\n    for i in range(100000):\n        x = [x]\n    return x"),
            "returned a list",
        ),
        (function("    return 9223372036854775807 + 1"), "too large"),
        (function("    return 1e308 * 10.0"), "too large"),
        (
            format!("X = {}1{}\ndef decide(case):\n    pass\n", "(".repeat(5000), ")".repeat(5000)),
            "nested too deeply",
        ),
        (format!("X = {}1\ndef decide(case):\n    pass\n", "not ".repeat(5000)), "nested too deeply"),
        (format!("X = {}1\ndef decide(case):\n    pass\n", "-".repeat(5000)), "nested too deeply"),
        (format!("X = {}1\ndef decide(case):\n    pass\n", "1 + ".repeat(5000)), "too long"),
        (format!("X = a{}\ndef decide(case):\n    pass\n", ".b".repeat(5000)), "too long"),
        (
            format!(
                "def decide(case):\n{}",
                (1..200).map(|n| format!("{}if True:\n", "    ".repeat(n))).collect::<String>()
            ),
            "nested too deeply",
        ),
        (format!("X = '{}'", "a".repeat(300_000)), "at most 256 KiB"),
        (
            function(
                "    x = '{}'.format('a' * 1000000)\n    for i in range(100):\n        y = x.replace('a', x)",
            ),
            "too much memory",
        ),
        (function("    for i in range(100000):\n        x = sorted(range(1000))"), "too m"),
    ] {
        let problem = decide(&text).expect_err(&text[..text.len().min(200)]);
        assert!(problem.contains(reported), "{problem} for {}", &text[..text.len().min(200)]);
    }
}

#[test]
fn a_policy_that_is_out_of_time_is_stopped() {
    let text =
        "def decide(case):\n    for a in range(3000):\n        for b in range(50):\n            pass\n";
    let policy = Policy::parse("mine.star", text).expect("it is sound");
    let incidents = incidents::read(KILL).expect("a table");
    let of = |out: &dyn Fn() -> bool| policy.decide(&incidents[0].settings, incidents[0].case(), out);
    assert!(of(&|| false).expect("it has time").steps < LIMITS.steps);
    assert!(of(&|| true).expect_err("no time").to_string().contains("takes too long"));
}

#[test]
fn the_same_case_gives_the_same_decision_in_the_same_number_of_steps() {
    let text = "SEEN = []\ndef decide(case):\n    return decision('stop', jitter(3) + 1, str(len(SEEN)))\n";
    assert_eq!(decide(text).expect("sound"), decide(text).expect("sound"));
}

#[test]
fn errors_in_incidents_name_the_allowed_values() {
    let wrong = |text: &str| incidents::read(text).expect_err(text);
    assert!(
        wrong("[[incident]]\nname = 'x'\ncause = { kind = 'sgnal' }\n")
            .contains("there are exception, exit_code")
    );
    let text = KILL.to_owned() + "expect = 'restart'\n";
    assert!(
        wrong(&text).starts_with(
            "incident \"a kill\": action: there is no \"restart\"; there are restart_in_process"
        )
    );
    assert!(wrong(&(KILL.to_owned() + "stp = 3\n")).contains("unknown field `stp`"));
}
