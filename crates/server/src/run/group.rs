//! The processes of a process group that are alive, with their names and users.
//!
//! 1. A zombie is not alive. It stays in its group until its parent reads its status.
//! 2. If a signal to a process is refused (EPERM), the process is alive, and has changed its user.
//! 3. Depending on its mount options, `/proc` does not show every process. If it shows no process
//!    of a group, the group counts as alive while a signal to the group succeeds or is refused.

use std::{fmt, fs};

use rustix::{
    io::Errno,
    process::{Pid, test_kill_process_group},
};

/// A process that is alive.
pub struct Member {
    id: i32,
    name: String,
    user: String,
    is_stopped: bool,
}

/// The processes that are alive in a group.
pub struct Alive(Vec<Member>);

impl Alive {
    /// Returns the processes of a group that are alive; `None` if there are none.
    pub fn in_group(group: Pid) -> Option<Self> {
        if test_kill_process_group(group) == Err(Errno::SRCH) {
            return None;
        }
        let group = group.as_raw_nonzero().get();
        let members: Vec<Stat> = processes().filter(|stat| stat.group == group).collect();
        if !members.is_empty() && members.iter().all(Stat::is_dead) {
            return None;
        }
        let alive = members.into_iter().filter(|stat| !stat.is_dead());
        Some(Self(alive.map(Member::from).collect()))
    }

    /// Returns the process with this id, if it is alive.
    pub fn process(id: Pid) -> Self {
        let stat = Stat::of(&id.as_raw_nonzero().to_string());
        let alive = stat.into_iter().filter(|stat| !stat.is_dead());
        Self(alive.map(Member::from).collect())
    }

    /// Returns whether all these processes are stopped, by a signal or a debugger.
    pub fn is_stopped(&self) -> bool {
        self.0.iter().all(|member| member.is_stopped)
    }
}

impl fmt::Display for Alive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        if self.0.is_empty() {
            return f.write_str("processes that /proc does not show");
        }
        for (n, member) in self.0.iter().take(SHOWN).enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            let Member { id, name, user, .. } = member;
            write!(f, "{comma}pid {id} ({name}, user {user})")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, ", and {more} more"),
        }
    }
}

impl From<Stat> for Member {
    fn from(stat: Stat) -> Self {
        Self {
            user: user(stat.id),
            id: stat.id,
            is_stopped: matches!(stat.state, 'T' | 't'),
            name: stat.name,
        }
    }
}

/// The fields of `/proc/PID/stat` that are used.
#[derive(Debug, PartialEq)]
struct Stat {
    id: i32,
    name: String,
    state: char,
    group: i32,
    threads: u32,
}

impl Stat {
    fn of(id: &str) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)
    }

    /// Parses a line. The name of the process may contain any character, including parentheses and
    /// spaces.
    fn parse(line: &str) -> Option<Self> {
        let (before, rest) = line.rsplit_once(") ")?;
        let (id, name) = before.split_once(" (")?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        Some(Self {
            id: id.parse().ok()?,
            name: name.into(),
            state: fields.first()?.chars().next()?,
            group: fields.get(2)?.parse().ok()?,
            threads: fields.get(17)?.parse().ok()?,
        })
    }

    /// Returns whether all threads of the process have ended. The first thread may end before the
    /// others.
    const fn is_dead(&self) -> bool {
        matches!(self.state, 'X' | 'x') || (self.state == 'Z' && self.threads <= 1)
    }
}

/// Returns all processes that `/proc` shows.
fn processes() -> impl Iterator<Item = Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name();
        let id = name.to_str()?;
        id.starts_with(|c: char| c.is_ascii_digit())
            .then(|| Stat::of(id))?
    })
}

/// Returns the effective user of a process, by name if there is one.
fn user(process: i32) -> String {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let Some(id) = line.and_then(|ids| ids.split_ascii_whitespace().nth(1)) else {
        return "unknown".into();
    };
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut users = users.lines().map(|line| line.split(':'));
    let name = users.find_map(|mut fields| {
        let name = fields.next()?;
        (fields.nth(1)? == id).then(|| name.to_owned())
    });
    name.unwrap_or_else(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "42 (a) b (c) Z 1 40 40 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 THREADS 0 7";

    #[test]
    fn a_zombie_without_threads_is_dead() {
        let stat = Stat::parse(&LINE.replace("THREADS", "1")).unwrap();
        assert_eq!((stat.id, &*stat.name, stat.group), (42, "a) b (c", 40));
        assert!(stat.is_dead());
    }

    #[test]
    fn a_process_whose_first_thread_ended_is_alive() {
        let stat = Stat::parse(&LINE.replace("THREADS", "2")).unwrap();
        assert!(!stat.is_dead());
        let asleep = LINE.replace("THREADS", "1").replace(") Z", ") D");
        assert!(!Stat::parse(&asleep).unwrap().is_dead());
    }

    #[test]
    fn a_process_is_named_with_its_user() {
        let id = std::process::id() as i32;
        let alive = Alive::process(Pid::from_raw(id).unwrap()).to_string();
        assert!(alive.starts_with(&format!("pid {id} (")), "{alive}");
        assert!(
            alive.contains(", user ") && !alive.contains("unknown"),
            "{alive}"
        );
        assert!(!Alive::process(Pid::from_raw(id).unwrap()).is_stopped());
    }
}
