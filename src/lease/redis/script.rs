//! Lua scripts, and calls to them.

use redis::{ErrorKind, FromRedisValue, RedisResult, ServerErrorKind, ToRedisArgs};

use super::connection::Connection;

/// Lua script.
pub(super) struct Script {
    text: String,
    /// The SHA-1 of the text, by which the server identifies the script.
    digest: String,
}

/// Call to a script, with its keys and arguments.
pub(super) struct Call<'a> {
    script: &'a Script,
    keys: Vec<String>,
    arguments: Vec<Vec<u8>>,
}

impl Script {
    pub(super) fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        Self {
            digest: redis::Script::new(&text).get_hash().to_owned(),
            text,
        }
    }

    /// Returns a call with this key, if there is one, and without arguments.
    pub(super) fn call(&self, key: impl Into<Option<String>>) -> Call<'_> {
        Call {
            script: self,
            keys: key.into().into_iter().collect(),
            arguments: vec![],
        }
    }
}

impl Call<'_> {
    /// Adds a key.
    pub(super) fn key(&mut self, key: String) {
        self.keys.push(key);
    }

    /// Adds an argument.
    pub(super) fn arg(&mut self, argument: impl ToRedisArgs) -> &mut Self {
        argument.write_redis_args(&mut self.arguments);
        self
    }

    /// Runs the script. If the server does not know the script, sends its text. `redis::Script` is
    /// not used, because in a cluster it loads the script on all nodes. If one node did not
    /// respond, the leases of all other nodes would be unavailable.
    pub(super) async fn invoke<T: FromRedisValue>(
        &self,
        connection: &mut Connection,
    ) -> RedisResult<T> {
        let Script { text, digest } = self.script;
        match self
            .command("EVALSHA", digest)
            .query_async(connection)
            .await
        {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                self.command("EVAL", text).query_async(connection).await
            }
            answer => answer,
        }
    }

    fn command(&self, name: &str, script: &str) -> redis::Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(self.keys.len()).arg(&self.keys);
        command.arg(&self.arguments);
        command
    }
}
