//! The fault run: clients write while servers fail, and a checker judges the responses. The tokens
//! give the checker the order of all writes.
//!
//! `tests/run --tier faults` runs the clients for a minute. `tests/run --faults SECONDS [--seed N]
//! [--store NAME]` runs them for the given time.

mod arguments;
mod checker;
mod clients;
mod faults;
mod history;
mod plan;
mod run;
mod servers;
mod service;
mod summary;
mod tables;

use std::{env, panic, process::ExitCode, time::Instant};

use tower_fence_tests as support;

use self::{
    arguments::Arguments,
    checker::{bad_failovers, bad_histories, linearizable, refusals, windows},
};

/// A test with its name. It panics if it fails.
type Test<'a> = (&'static str, Box<dyn Fn() + 'a>);

/// A check with its name. It takes a seed, and panics if it fails.
type Check = (&'static str, fn(u64));

macro_rules! checks {
    ($($module:ident::$check:ident,)+) => {
        [$((concat!("checker::", stringify!($check)), $module::$check as fn(u64)),)+]
    };
}

/// The checks of the checker itself. They run before the fault run, with the same seed.
const CHECKS: [Check; 6] = checks![
    bad_histories::each_kind_of_bad_history_is_found,
    bad_failovers::a_failover_may_lose_the_last_writes_with_all_that_is_newer,
    refusals::a_refusal_is_excused_only_within_its_window,
    bad_histories::a_million_operations_are_judged,
    linearizable::the_checker_and_a_search_for_an_order_judge_alike,
    windows::a_window_that_has_no_order_is_found,
];
const RUN: &str =
    "under_faults::the_fence_loses_nothing_with_pgbouncer_and_a_wall_clock_that_jumps";

fn main() -> ExitCode {
    let given: Vec<String> = env::args().skip(1).collect();
    match given.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["service", settings] => {
            runtime().block_on(service::serve(settings));
            return ExitCode::SUCCESS;
        }
        ["clients", settings] => {
            runtime().block_on(clients::process::work(settings));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let arguments = match Arguments::parse(given.into_iter()) {
        Ok(arguments) => arguments,
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::FAILURE;
        }
    };
    let seed = arguments.options.seed;
    let run = || {
        let summary = runtime().block_on(run::run(arguments.options.clone()));
        println!("{summary}");
        let failures = summary.failures();
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    };
    let mut tests: Vec<Test<'_>> = vec![];
    for (name, check) in CHECKS {
        tests.push((name, Box::new(move || check(seed))));
    }
    tests.push((RUN, Box::new(run)));
    tests.retain(|(name, _)| arguments.asks_for(name));
    if arguments.list {
        for (name, _) in tests {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let (began, mut failed) = (Instant::now(), 0);
    println!("\nrunning {} tests\nseed {seed}", tests.len());
    for (name, test) in &tests {
        let is_ok = panic::catch_unwind(panic::AssertUnwindSafe(test)).is_ok();
        println!("test {name} ... {}", if is_ok { "ok" } else { "FAILED" });
        failed += usize::from(!is_ok);
    }
    let (passed, took) = (tests.len() - failed, began.elapsed().as_secs_f64());
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; finished in {took:.2}s");
    ExitCode::from(u8::from(failed > 0))
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}
