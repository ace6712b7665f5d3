//! Reload of the files with the secrets of clients, the token keys and the certificate on SIGHUP. A
//! reload does not read the credentials and the certificates for the database, Redis or etcd.

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
use crate::{failure::Failure, secrets::Secret};

/// The variables that may contain secrets or token keys instead of a file. They cannot change while
/// the server runs.
const VARIABLES: [&str; 3] = [
    "TOWER_FENCE_HOLDER_SECRETS",
    "TOWER_FENCE_OPERATOR_SECRETS",
    "TOWER_FENCE_TOKEN_KEY",
];

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
                    this.reload();
                    _ = done.send(());
                });
                _ = ended.await;
            }
        });
    }

    fn reload(&self) {
        let (holders, operators) = (
            &self.files.holder_secrets_file,
            &self.files.operator_secrets_file,
        );
        let has_secrets_file = holders.is_some() || operators.is_some();
        let has_key_file = self.leases.token_key_file.is_some();
        let certificate = self
            .tls
            .as_ref()
            .map_or(Ok(()), |tls| tls.replace(&self.files));
        let read = [
            (
                "secrets of clients",
                has_secrets_file,
                self.access.replace(&self.files),
            ),
            ("token keys", has_key_file, self.keys()),
            ("certificate", self.tls.is_some(), certificate),
        ];
        let mut reloaded = vec![];
        for (what, is_in_file, outcome) in read {
            match outcome {
                Ok(()) if is_in_file => reloaded.push(what),
                Ok(()) => {}
                Err(failure) => {
                    tracing::error!(
                        what,
                        error = failure.text,
                        "not reloaded: the old values stay in use"
                    );
                }
            }
        }
        match reloaded.is_empty() {
            true => tracing::info!("nothing was reloaded"),
            false => {
                tracing::info!(what = reloaded.join(", "), access = %self.access.secrets(), "reloaded")
            }
        }
        for variable in VARIABLES {
            if let Ok(Some(_)) = Secret::find(variable, None) {
                tracing::warn!(
                    variable,
                    "secrets in the environment are not read again: restart the server"
                );
            }
        }
    }

    fn keys(&self) -> Result<(), Failure> {
        if let (Some(keys), Some(read)) = (&self.token_keys, token_keys(&self.leases)?) {
            keys.replace(&read);
        }
        Ok(())
    }
}
