//! The OpenAPI document: the handlers' operations, the additions of the layers, and the locks.

use axum::Router;
use tower_fence::{
    FenceLayer,
    fence::FenceDatabase,
    layer::ResourceFrom,
    openapi::{add_problems, custom_problem},
    problem::ProblemType,
};
use utoipa::{
    OpenApi as _, PartialSchema, ToSchema,
    openapi::{ObjectBuilder, OpenApi, RefOr, Schema, Type, link::Link},
};
use utoipa_axum::router::OpenApiRouter;

use crate::app;

pub const NOT_FOUND: &str = "https://example.com/problems/not-found";
pub const OUT_OF_STOCK: &str = "https://example.com/problems/out-of-stock";

/// The problem for an unknown SKU.
pub struct NotFound;

impl PartialSchema for NotFound {
    fn schema() -> RefOr<Schema> {
        custom_problem(NOT_FOUND, 404, "No such SKU").into()
    }
}

/// The problem for a SKU with too little stock.
pub struct OutOfStock;

impl PartialSchema for OutOfStock {
    fn schema() -> RefOr<Schema> {
        let stock = ObjectBuilder::new().schema_type(Type::Integer);
        custom_problem(OUT_OF_STOCK, 409, "Not enough in stock")
            .property("stock", stock.minimum(Some(0)))
            .required("stock")
            .into()
    }
}

impl ToSchema for NotFound {}
impl ToSchema for OutOfStock {}

#[derive(utoipa::OpenApi)]
#[openapi(paths(app::show, app::set, app::decrement))]
struct OfStock;

#[derive(utoipa::OpenApi)]
#[openapi(paths(app::transfer))]
struct OfTransfers;

#[derive(utoipa::OpenApi)]
#[openapi(
    paths(app::health),
    info(
        title = "Inventory",
        description = "Stock that is written under leases."
    )
)]
struct OfHealth;

/// The problems of a handler if its body is invalid or a statement fails.
const PROBLEMS_OF_HANDLERS: &[ProblemType] = &[
    ProblemType::InvalidRequest,
    ProblemType::FenceBusy,
    ProblemType::StoreUnavailable,
    ProblemType::TransactionAborted,
];

pub fn of_stock<DB: FenceDatabase, R: ResourceFrom>(layer: &FenceLayer<DB, R>) -> OpenApi {
    fenced(OfStock::openapi(), layer)
}

pub fn of_transfers<DB: FenceDatabase, R: ResourceFrom>(layer: &FenceLayer<DB, R>) -> OpenApi {
    fenced(OfTransfers::openapi(), layer)
}

fn fenced<DB: FenceDatabase, R: ResourceFrom>(
    mut api: OpenApi,
    layer: &FenceLayer<DB, R>,
) -> OpenApi {
    add_problems(&mut api, PROBLEMS_OF_HANDLERS);
    layer.describe(&mut api);
    api
}

pub fn of_health() -> OpenApi {
    let mut api = OfHealth::openapi();
    add_problems(
        &mut api,
        &[
            ProblemType::StoreUnavailable,
            ProblemType::TransactionAborted,
        ],
    );
    api
}

/// Combines a router with its document.
pub fn described(router: Router, api: OpenApi) -> OpenApiRouter {
    let mut router = OpenApiRouter::from(router);
    *router.get_openapi_mut() = api;
    router
}

/// Adds links that describe the purpose of a lease: a write under its token.
pub fn linked(mut api: OpenApi) -> OpenApi {
    let locks = api.paths.paths.get_mut("/locks/{resource}");
    let acquire = locks.and_then(|item| item.post.as_mut());
    let granted = acquire.and_then(|acquire| acquire.responses.responses.get_mut("201"));
    if let Some(RefOr::T(granted)) = granted {
        for (name, operation) in [
            ("SetStock", "set_stock"),
            ("DecrementStock", "decrement_stock"),
        ] {
            let link = Link::builder()
                .operation_id(operation)
                .parameter("sku", "$response.body#/resource")
                .parameter("Fencing-Token", "$response.body#/fencing_token");
            granted.links.insert(name.into(), link.build().into());
        }
    }
    api
}
