//! CPU time of the load, the service and the servers.

use std::{
    collections::HashMap,
    fs,
    ops::Sub,
    path::{Path, PathBuf},
    time::Duration,
};

/// CPU time since the start of the process, or between two moments.
#[derive(Clone, Copy)]
pub struct Cpu {
    /// The time of the calling thread.
    pub load: Duration,
    /// The time of all other threads of this process.
    pub service: Duration,
    /// The time of the processes that this process has started, and of all their descendants.
    pub servers: Duration,
}

impl Cpu {
    /// Reads the CPU times.
    ///
    /// The CPU times are available only on Linux. The resolution is a clock tick of 10 ms.
    pub fn now() -> Self {
        let load = ticks(Path::new("/proc/thread-self"));
        Self {
            load,
            service: ticks(Path::new("/proc/self")).saturating_sub(load),
            servers: descendants().iter().map(|id| ticks(&process(*id))).sum(),
        }
    }
}

impl Sub for Cpu {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            load: self.load.saturating_sub(before.load),
            service: self.service.saturating_sub(before.service),
            servers: self.servers.saturating_sub(before.servers),
        }
    }
}

fn process(id: u32) -> PathBuf {
    Path::new("/proc").join(id.to_string())
}

/// Returns the time in user mode and in the kernel together.
fn ticks(process: &Path) -> Duration {
    let fields = stat(process).unwrap_or_default();
    let number = |place: usize| {
        fields
            .get(place)
            .and_then(|field| field.parse::<u64>().ok())
    };
    let ticks = number(11).unwrap_or_default() + number(12).unwrap_or_default();
    Duration::from_millis(10 * ticks)
}

/// Returns the fields of a process after its name, such as the state and the parent.
///
/// The name may contain spaces.
fn stat(process: &Path) -> Option<Vec<String>> {
    let text = fs::read_to_string(process.join("stat")).ok()?;
    let (_, fields) = text.rsplit_once(") ")?;
    Some(fields.split(' ').map(str::to_owned).collect())
}

fn descendants() -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let id = entry.file_name().to_string_lossy().parse();
        let Ok(id) = id else { continue };
        let fields = stat(&entry.path()).unwrap_or_default();
        let parent = fields.get(1).and_then(|field| field.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(id);
    }
    let mut found = vec![std::process::id()];
    let mut next = 0;
    while next < found.len() {
        found.extend(children.remove(&found[next]).unwrap_or_default());
        next += 1;
    }
    found.split_off(1)
}
