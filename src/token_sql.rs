//! Encoding of [`Token`] as BIGINT (in SQLite INTEGER) and of [`Resource`] as TEXT, for sqlx's
//! queries. Decoding checks that the values are valid.

use sqlx::{Database, Decode, Encode, Type, encode::IsNull, error::BoxDynError};

use crate::token::{Resource, Token};

macro_rules! as_column {
    ($value:ty, $column:ty, $to:expr, $from:expr) => {
        impl<DB: Database> Type<DB> for $value
        where
            $column: Type<DB>,
        {
            fn type_info() -> DB::TypeInfo {
                <$column as Type<DB>>::type_info()
            }

            fn compatible(column: &DB::TypeInfo) -> bool {
                <$column as Type<DB>>::compatible(column)
            }
        }

        impl<'q, DB: Database> Encode<'q, DB> for $value
        where
            $column: Encode<'q, DB>,
        {
            fn encode_by_ref(
                &self,
                buffer: &mut <DB as Database>::ArgumentBuffer,
            ) -> Result<IsNull, BoxDynError> {
                <$column as Encode<'q, DB>>::encode($to(self), buffer)
            }
        }

        /// Decodes the column. Returns an error if the value is invalid.
        impl<'r, DB: Database> Decode<'r, DB> for $value
        where
            $column: Decode<'r, DB>,
        {
            fn decode(value: <DB as Database>::ValueRef<'r>) -> Result<Self, BoxDynError> {
                Ok($from(<$column as Decode<'r, DB>>::decode(value)?)?)
            }
        }

        /// Encodes an array of the column's type, for example for `= ANY($1)`.
        #[cfg(feature = "postgres")]
        impl sqlx::postgres::PgHasArrayType for $value {
            fn array_type_info() -> sqlx::postgres::PgTypeInfo {
                <$column as sqlx::postgres::PgHasArrayType>::array_type_info()
            }

            fn array_compatible(column: &sqlx::postgres::PgTypeInfo) -> bool {
                <$column as sqlx::postgres::PgHasArrayType>::array_compatible(column)
            }
        }
    };
}

as_column!(Token, i64, |token: &Token| token.get(), Token::new);
as_column!(
    Resource,
    String,
    |resource: &Resource| resource.as_str().to_owned(),
    Resource::new
);
