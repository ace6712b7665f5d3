//! A description of the machine.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};

/// Returns a description of the machine, and the versions of its programs.
pub fn describe(postgres: &Path) -> Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    json!({
        "cores": cores,
        "processor": processor(),
        "memory_mib": memory_mib(),
        "postgres": version(&postgres.join("postgres").to_string_lossy()),
        "redis": version("redis-server"),
        "etcd": version("etcd"),
    })
}

/// Returns the first line of a program's version, or `None` if the program is not installed.
pub fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next()?;
    // Redis appends details of its build to the version.
    let line = line.split(" sha=").next()?;
    Some(line.to_owned())
}

fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_mib() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text.lines().next()?.split_whitespace().nth(1)?;
    Some(kib.parse::<u64>().ok()? / 1_024)
}
