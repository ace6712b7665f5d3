//! Searches the models in large bounds: all models, or those that the arguments name. A search
//! takes minutes, and some gigabytes of memory.

use std::{env, process::ExitCode, time::Instant};

use tower_fence_model::searches;

const SEARCHES: [(&str, fn()); 7] = [
    // Three holders: 9.6 million states.
    ("fence", searches::fence::large_bounds),
    // Three holders and a removal: 5 million states.
    ("floors", searches::floors::large_bounds),
    // Three requests, two crashes and two failures.
    ("keys", searches::keys::large_bounds),
    // 193 million states, most of them with three holders and two losses of Redis.
    ("losses", searches::losses::large_bounds),
    // 87 million states: any loss, forged tokens and new tokens.
    ("last-word", searches::last_word::large_bounds),
    // 135 million states, most of them with a restart on all nodes.
    ("quorum", searches::quorum::large_bounds),
    // 14 million states.
    ("etcd", searches::etcd::large_bounds),
];

fn main() -> ExitCode {
    let names: Vec<String> = env::args().skip(1).collect();
    let is_known = |name: &String| SEARCHES.iter().any(|(known, _)| known == name);
    if let Some(unknown) = names.iter().find(|name| !is_known(name)) {
        let known = SEARCHES.map(|(name, _)| name).join(", ");
        eprintln!("no such search: {unknown}; the searches are {known}");
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
