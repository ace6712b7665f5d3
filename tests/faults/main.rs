//! Runs under faults, with a checker that knows the order of all writes by their tokens.
//!
//! `cargo test --test faults` runs for a minute; `tests/run --faults SECONDS [--seed N] [--store NAME]` for so long.

mod checker;
mod history;

use std::{env, panic, process::ExitCode, time::Instant};

type Test = (&'static str, fn());

const TESTS: [Test; 4] = [
    (
        "checker::each_kind_of_bad_history_is_found",
        checker::samples::each_kind_of_bad_history_is_found,
    ),
    (
        "checker::a_failover_may_lose_the_last_writes_with_all_that_is_newer",
        checker::samples::a_failover_may_lose_the_last_writes_with_all_that_is_newer,
    ),
    (
        "checker::a_million_operations_are_judged",
        checker::samples::a_million_operations_are_judged,
    ),
    (
        "checker::the_checker_and_a_search_for_an_order_judge_alike",
        checker::linearizable::the_checker_and_a_search_for_an_order_judge_alike,
    ),
];

fn main() -> ExitCode {
    let filters: Vec<String> = env::args().skip(1).collect();
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in TESTS {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(filter)) {
            continue;
        }
        let began = Instant::now();
        let ok = panic::catch_unwind(test).is_ok();
        println!(
            "test {name} ... {} ({:.1?})",
            if ok { "ok" } else { "FAILED" },
            began.elapsed()
        );
        *(if ok { &mut passed } else { &mut failed }) += 1;
    }
    println!("test result: {passed} passed; {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}
