//! A wall clock that a test sets, for processes of its own, by libfaketime.

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use tempfile::TempDir;

/// The clock that a process believes in. The monotonic one goes on as it is.
pub struct WallClock {
    folder: TempDir,
    file: String,
    preload: String,
}

impl WallClock {
    /// It is right until it jumps.
    pub fn right() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Self {
            file: text(&folder.path().join("clock")),
            folder,
            // Redis' own allocator asks for the time before there is any.
            preload: format!("{} libc.so.6", library().display()),
        };
        clock.jump_to("+0");
        clock
    }

    /// So far from the right time: `+1d`, `-30y`.
    pub fn jump_to(&self, offset: &str) {
        // Nobody is to read half of it.
        let new = self.folder.path().join("new");
        std::fs::write(&new, offset).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }

    /// What a process with this clock has in its environment.
    pub fn variables(&self) -> [(&str, &str); 5] {
        [
            ("LD_PRELOAD", &self.preload),
            ("FAKETIME_TIMESTAMP_FILE", &self.file),
            ("FAKETIME_NO_CACHE", "1"),
            ("DONT_FAKE_MONOTONIC", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ]
    }
}

/// What a process has in its environment whose wall clock is so far off for as long as it runs: it reads no file, which one
/// that asks for the time in a handler of a signal could not.
#[allow(dead_code, reason = "for the Postgres of the fault run")]
pub fn off_by(offset: &str) -> Vec<(&'static str, String)> {
    vec![
        ("LD_PRELOAD", library().display().to_string()),
        ("FAKETIME", offset.into()),
        ("DONT_FAKE_MONOTONIC", "1".into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
    ]
}

/// Whether this is what a clock tells that is wrong, in seconds since 1970.
#[allow(dead_code, reason = "for the fault run")]
pub fn is_wrong(told: Option<i64>) -> bool {
    let right = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    told.is_some_and(|told| told.unsigned_abs().abs_diff(right.as_secs()) > 1)
}

fn library() -> PathBuf {
    let library = ["/usr/lib", "/lib"].iter().find_map(|folder| {
        let arch = format!("{}-linux-gnu", std::env::consts::ARCH);
        let path = PathBuf::from(folder).join(arch);
        let path = path.join("faketime/libfaketime.so.1");
        path.exists().then_some(path)
    });
    library.expect("libfaketime is not installed: use tests/run")
}

fn text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}
