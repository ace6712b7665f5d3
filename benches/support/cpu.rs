//! CPU time of the load, the service and the servers.

use std::{ops::Sub, path::Path, time::Duration};

use tower_fence_tests::process::{family, stat};

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
        let load = ticks("/proc/thread-self");
        let servers = family(std::process::id()).into_iter().skip(1);
        Self {
            load,
            service: ticks("/proc/self").saturating_sub(load),
            servers: servers.map(|id| ticks(&format!("/proc/{id}"))).sum(),
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

/// Returns the time in user mode and in the kernel together.
fn ticks(process: &str) -> Duration {
    let fields = stat(Path::new(process)).unwrap_or_default();
    let number = |place: usize| {
        fields
            .get(place)
            .and_then(|field| field.parse::<u64>().ok())
    };
    let ticks = number(11).unwrap_or_default() + number(12).unwrap_or_default();
    Duration::from_millis(10 * ticks)
}
