//! The lock recipe of ZooKeeper. A holder has the lowest of the ephemeral sequential nodes in the
//! folder of a lock, and deletes it to release the lock.

use std::net::SocketAddr;

use zookeeper_client::{Acls, Client, CreateMode, LockPrefix};

use crate::{
    contenders::TTL,
    support::tasks::{Operation, Outcome},
};

/// Task with one session, which locks and unlocks its resources in turn.
#[derive(Clone)]
pub struct ZooKeeperLock {
    session: Client,
    /// Folders of the locks.
    folders: Vec<String>,
    next: usize,
}

impl ZooKeeperLock {
    /// Opens a session, and creates the folders.
    pub async fn open(addr: SocketAddr, names: Vec<String>) -> Self {
        let connector = Client::connector().with_session_timeout(TTL);
        let session = connector.connect(&addr.to_string()).await;
        let session = session.expect("zookeeper answers");
        let folders: Vec<_> = names.iter().map(|name| format!("/locks/{name}")).collect();
        for folder in &folders {
            let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
            let made = session.mkdir(folder, &options).await;
            made.expect("zookeeper answers");
        }
        Self {
            session,
            folders,
            next: 0,
        }
    }

    /// Checks that no lock of this task is held, and returns how often the locks were granted.
    pub async fn granted_and_free(&self) -> u64 {
        let mut changes = 0;
        for folder in &self.folders {
            let stat = self.session.check_stat(folder).await;
            let stat = stat.expect("zookeeper answers").expect("it was created");
            assert_eq!(stat.num_children, 0, "{folder} was not released");
            changes += u64::try_from(stat.cversion).expect("a count");
        }
        // Each lock changes its folder twice: it creates a node, and then deletes the node.
        changes / 2
    }
}

impl Operation for ZooKeeperLock {
    async fn run(&mut self) -> Outcome {
        let folder = &self.folders[self.next];
        self.next = (self.next + 1) % self.folders.len();
        let prefix = LockPrefix::new_curator(folder, "lock-").expect("a name");
        let lock = self.session.lock(prefix, b"", Acls::anyone_all()).await;
        let lock = lock.expect("it is free");
        let deleted = self.session.delete(lock.lock_path(), None).await;
        deleted.expect("it was held");
        // If the lock were dropped, the library would delete the node again.
        std::mem::forget(lock);
        Outcome::Done
    }
}
