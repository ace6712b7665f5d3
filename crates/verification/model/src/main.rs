//! Searches the models in large bounds, all of them or those that are named: minutes, and some gigabytes of memory.

use std::{env, process::ExitCode, time::Instant};

use tower_fence_model::searches;

const SEARCHES: [(&str, fn()); 7] = [
    // Three holders: 11 million states.
    ("fence", searches::fence_in_large_bounds),
    // Three holders, and a removal: 5 million states.
    ("floors", searches::floors_in_large_bounds),
    // Three requests, two crashes, two failures.
    ("keys", searches::keys_in_large_bounds),
    // Three holders with two losses of Redis: 143 million states.
    ("losses", searches::losses_in_large_bounds),
    // Two holders with any loss, who may take a new token: 59 million states.
    ("last-word", searches::last_word_in_large_bounds),
    // Seventeen million states.
    ("quorum", searches::quorum_in_large_bounds),
    // Fourteen million states.
    ("etcd", searches::etcd_in_large_bounds),
];

fn main() -> ExitCode {
    let names: Vec<String> = env::args().skip(1).collect();
    let is_known = |name: &String| SEARCHES.iter().any(|(known, _)| known == name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known = SEARCHES.map(|(name, _)| name).join(", ");
        eprintln!("no such search: {unknown}; there are {known}");
        return ExitCode::FAILURE;
    }
    for (name, search) in SEARCHES {
        if names.is_empty() || names.iter().any(|asked| asked == name) {
            let began = Instant::now();
            search();
            println!("{name}: {:.0?}", began.elapsed());
        }
    }
    ExitCode::SUCCESS
}
