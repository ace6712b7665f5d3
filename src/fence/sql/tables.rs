//! Where the fence's tables are.
//!
//! Every statement names their schema. An application may change `search_path` in its transactions,
//! or leave it changed on a connection, or have a temporary table of the same name: none of that
//! leads a check to other rows. What the server cannot do is left out of them.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use super::Capabilities;

/// What a database answers when it is asked for the tables.
pub(crate) struct Found {
    /// The schema, or, in SQLite, the database file.
    pub(in crate::fence) schema: String,
    /// Nothing where the tables are those of an older version.
    pub(in crate::fence) capabilities: Option<Capabilities>,
    /// What makes the fence unfit for use, and what to do about it.
    pub(in crate::fence) flaw: Option<String>,
}

/// The schema of the fence's tables, and the texts of the statements on them.
pub(crate) struct Tables {
    /// As an identifier in double quotes.
    schema: Box<str>,
    pub(in crate::fence) capabilities: Capabilities,
    /// By the address of the template, which is that of a constant.
    texts: RwLock<HashMap<usize, Arc<str>>>,
}

impl Tables {
    /// The tables in this schema, or, in SQLite, in this database file.
    pub(in crate::fence) fn new(schema: &str, capabilities: Capabilities) -> Self {
        Self {
            schema: quoted(schema).into(),
            capabilities,
            texts: RwLock::default(),
        }
    }

    /// The text of a statement whose tables are written `{schema}.fence_…`.
    pub(in crate::fence) fn sql(&self, template: &'static str) -> SqlStr {
        let address = template.as_ptr() as usize;
        let texts = self.texts.read().unwrap_or_else(PoisonError::into_inner);
        let known = texts.get(&address).cloned();
        drop(texts);
        let text = known.unwrap_or_else(|| {
            let text: Arc<str> = self.qualify(template).into();
            let mut texts = self.texts.write().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(texts.entry(address).or_insert(text))
        });
        AssertSqlSafe(text).into_sql_str()
    }

    fn qualify(&self, template: &str) -> String {
        let statement = self.capabilities.adapt(template);
        statement.replace("{schema}", &self.schema)
    }

    /// The schema, ready to be put into a statement.
    pub(in crate::fence) fn schema(&self) -> &str {
        &self.schema
    }
}

/// An identifier of SQL, whatever its characters.
pub(in crate::fence) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_is_qualified_and_odd_names_are_quoted() {
        let tables = Tables::new("we\"ird", Capabilities::ALL);
        const TEMPLATE: &str = "SELECT 1 FROM {schema}.fence_a, {schema}.fence_b";
        let expected = "SELECT 1 FROM \"we\"\"ird\".fence_a, \"we\"\"ird\".fence_b";
        for _ in 0..2 {
            assert_eq!(tables.sql(TEMPLATE).as_str(), expected);
        }
        assert_eq!(tables.texts.read().unwrap().len(), 1);
    }
}
