//! A wall clock that a test sets for its processes with libfaketime.

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use tempfile::TempDir;

/// A wall clock for a process. Its monotonic clock is not changed.
pub struct WallClock {
    folder: TempDir,
    file: String,
    preload: String,
}

impl WallClock {
    /// Creates a clock that shows the correct time.
    pub fn right() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Self {
            file: text(&folder.path().join("clock")),
            folder,
            // libc is preloaded, too, because the allocator of Redis reads the time before
            // libfaketime is ready.
            preload: format!("{} libc.so.6", library().display()),
        };
        clock.jump_to("+0");
        clock
    }

    /// Sets the offset from the correct time, such as `+1d` or `-30y`.
    pub fn jump_to(&self, offset: &str) {
        // The rename prevents a process from reading half of the file.
        let new = self.folder.path().join("new");
        std::fs::write(&new, offset).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }

    /// Returns the environment variables of a process with this clock.
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

/// Returns the environment variables of a process whose wall clock has a constant offset. The
/// process does not read the offset from a file, so it can read the time in a signal handler, as
/// Postgres does.
pub fn off_by(offset: &str) -> Vec<(&'static str, String)> {
    vec![
        ("LD_PRELOAD", library().display().to_string()),
        ("FAKETIME", offset.into()),
        ("DONT_FAKE_MONOTONIC", "1".into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
    ]
}

/// Whether a time in seconds since 1970 differs from the correct time.
pub fn is_wrong(time: Option<i64>) -> bool {
    let right = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    time.is_some_and(|time| time.unsigned_abs().abs_diff(right.as_secs()) > 1)
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
