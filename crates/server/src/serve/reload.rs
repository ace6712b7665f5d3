//! Reload of the secrets of clients, the token keys and the certificate on SIGHUP. A reload does
//! not read the credentials and the certificates for the database, Redis or etcd.

use std::{sync::Arc, thread};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
};
use tower_fence::TokenKeys;

use super::{
    access::Access,
    args::{AccessArgs, LeaseArgs, ServeArgs},
    tls::Tls,
    token_keys,
};
use crate::failure::Failure;

/// The values that a reload replaces, and the settings that name their files.
pub struct Reload {
    files: AccessArgs,
    leases: LeaseArgs,
    access: Access,
    tls: Option<Tls>,
    token_keys: Option<TokenKeys>,
}

/// Installs the handler of SIGHUP. A signal that arrives before [`Reload::on_each`] causes a reload
/// later.
pub fn hangups() -> Result<Signal, Failure> {
    signal(SignalKind::hangup())
        .map_err(|error| Failure::unavailable("cannot handle signals", &error))
}

impl Reload {
    pub fn new(
        args: &ServeArgs,
        access: Access,
        tls: Option<Tls>,
        token_keys: Option<TokenKeys>,
    ) -> Self {
        Self {
            files: args.access.clone(),
            leases: args.leases.clone(),
            access,
            tls,
            token_keys,
        }
    }

    /// Reloads on each SIGHUP. If a file is invalid, the log reports it, and the old values stay in
    /// use.
    pub fn on_each(self, mut hangups: Signal) {
        let this = Arc::new(self);
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                let (this, (done, ended)) = (Arc::clone(&this), oneshot::channel());
                // Reading a file can block forever. Therefore use a separate thread: the shutdown
                // waits for the threads of the runtime, but not for this one.
                thread::spawn(move || {
                    this.read();
                    _ = done.send(());
                });
                _ = ended.await;
            }
        });
    }

    fn read(&self) {
        let read = [
            ("secrets of clients", self.access.replace(&self.files)),
            ("certificate", self.certificate()),
            ("token keys", self.keys()),
        ];
        let mut all = true;
        for (what, outcome) in read {
            if let Err(failure) = outcome {
                tracing::error!(what, error = %failure.text, "not reloaded: the old values stay in use");
                all = false;
            }
        }
        if all {
            tracing::info!(access = %self.access, "reloaded the secrets of clients, the token keys and the certificate");
        }
    }

    fn certificate(&self) -> Result<(), Failure> {
        self.tls
            .as_ref()
            .map_or(Ok(()), |tls| tls.replace(&self.files))
    }

    fn keys(&self) -> Result<(), Failure> {
        if let (Some(keys), Some(read)) = (&self.token_keys, token_keys(&self.leases)?) {
            keys.replace(&read);
        }
        Ok(())
    }
}
