//! The processes of a command that are alive, with their names and users.
//!
//! 1. The processes of a command are those of its process group, and all descendants of this
//!    process, because a process can leave its group. On Linux, this process adopts orphans, so all
//!    processes that the command has started stay descendants.
//! 2. If a shell executes this program, this process inherits the children of the shell. They and
//!    their descendants do not belong to the command.
//! 3. A zombie is not alive. It stays in its group until its parent reads its status.
//! 4. If a signal to a process is refused (EPERM), the process is alive, and has changed its user.
//! 5. Depending on its mount options, `/proc` may hide processes. If it shows no process of a
//!    group, the group counts as alive while a signal to the group succeeds or is refused. If it
//!    shows no child of this process, a descendant counts as alive while there is a child.

use std::{collections::HashSet, fmt, fs};

use rustix::{
    io::Errno,
    process::{Pid, WaitId, WaitIdOptions, getpid, test_kill_process_group, waitid},
};

/// A process that is alive.
pub struct Member {
    id: i32,
    group: i32,
    name: String,
    user: String,
    is_stopped: bool,
}

/// The processes of a command that are alive.
pub struct Alive(Vec<Member>);

impl Alive {
    /// Returns the processes of a command that are alive; `None` if there are none. `group` is the
    /// group of the command, unless it is empty.
    pub fn of_command(group: Option<Pid>, inherited: &Inherited) -> Option<Self> {
        let group = group.filter(|group| !is_empty(*group));
        if group.is_none() && !has_children() {
            return None;
        }
        let all: Vec<Stat> = processes().collect();
        let (group, this) = (group.map(number), number(getpid()));
        let is_in_group = |stat: &Stat| Some(stat.group) == group;
        let is_hidden = (group.is_some() && !all.iter().any(is_in_group))
            || (has_children() && !all.iter().any(|stat| stat.parent == this));
        let descendants = descendants(&all, this, inherited);
        let belongs = |stat: &Stat| is_in_group(stat) || descendants.contains(&stat.id);
        let alive = all
            .into_iter()
            .filter(|stat| belongs(stat) && !stat.is_dead());
        let alive: Vec<Member> = alive.map(Member::from).collect();
        (is_hidden || !alive.is_empty()).then_some(Self(alive))
    }

    /// Returns the process with this id, if it is alive.
    pub fn process(id: Pid) -> Self {
        let stat = Stat::of(&number(id).to_string());
        let alive = stat.into_iter().filter(|stat| !stat.is_dead());
        Self(alive.map(Member::from).collect())
    }

    /// Returns the processes that are not in the group.
    pub fn outside(&self, group: Pid) -> impl Iterator<Item = Pid> {
        let outside = self
            .0
            .iter()
            .filter(move |member| member.group != number(group));
        outside.filter_map(|member| Pid::from_raw(member.id))
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
            group: stat.group,
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
    parent: i32,
    group: i32,
    threads: u32,
    /// The start time, in clock ticks since the system has started.
    start: u64,
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
            parent: fields.get(1)?.parse().ok()?,
            group: fields.get(2)?.parse().ok()?,
            threads: fields.get(17)?.parse().ok()?,
            start: fields.get(19)?.parse().ok()?,
        })
    }

    /// Returns whether all threads of the process have ended. The first thread may end before the
    /// others.
    const fn is_dead(&self) -> bool {
        matches!(self.state, 'X' | 'x') || (self.state == 'Z' && self.threads <= 1)
    }
}

/// Returns whether no process is in this group, not even a zombie.
pub fn is_empty(group: Pid) -> bool {
    test_kill_process_group(group) == Err(Errno::SRCH)
}

/// The children of this process from before the command, by id and start time.
pub struct Inherited(HashSet<(i32, u64)>);

impl Inherited {
    pub fn now() -> Self {
        let this = number(getpid());
        let children = processes().filter(|stat| stat.parent == this);
        Self(children.map(|stat| (stat.id, stat.start)).collect())
    }
}

/// Returns whether this process has a child, or a zombie whose status it has not read. Outside
/// Linux, this process adopts no orphans, and the command itself is in its group.
fn has_children() -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    cfg!(target_os = "linux") && waitid(WaitId::All, options).err() != Some(Errno::CHILD)
}

/// Returns the ids of the descendants of a process. Skips each inherited process, together with its
/// descendants.
fn descendants(all: &[Stat], ancestor: i32, Inherited(old): &Inherited) -> HashSet<i32> {
    let mut found = HashSet::new();
    let mut parents = HashSet::from([ancestor]);
    while !parents.is_empty() {
        let children = all.iter().filter(|stat| parents.contains(&stat.parent));
        let children = children.filter(|stat| !old.contains(&(stat.id, stat.start)));
        // A process id that was reused during the read could form a cycle.
        parents = children
            .map(|stat| stat.id)
            .filter(|id| !found.contains(id))
            .collect();
        found.extend(&parents);
    }
    found
}

fn number(id: Pid) -> i32 {
    id.as_raw_nonzero().get()
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
        assert_eq!((stat.id, &*stat.name), (42, "a) b (c"));
        assert_eq!((stat.parent, stat.group, stat.start), (1, 40, 7));
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
    fn descendants_are_found_below_other_processes() {
        let stat = |id, parent, start| Stat {
            id,
            name: String::new(),
            state: 'S',
            parent,
            group: id,
            threads: 1,
            start,
        };
        // Process 5 has a reused id, which is lower than the id of its parent.
        let all = [
            stat(5, 40, 9),
            stat(10, 1, 1),
            stat(20, 10, 3),
            stat(21, 20, 9),
            stat(30, 10, 7),
            stat(40, 30, 8),
            stat(50, 1, 9),
        ];
        let found = |inherited| descendants(&all, 10, &Inherited(inherited));
        let own = HashSet::from([5, 30, 40]);
        assert_eq!(found(HashSet::from([(20, 3)])), own);
        // The id of the inherited process is that of another process now.
        let all_of_them = HashSet::from([5, 20, 21, 30, 40]);
        assert_eq!(found(HashSet::from([(20, 2)])), all_of_them);
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
