//! Generates the client and the server of the service `shop.Stock`.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let take = Method::builder()
        .name("take")
        .route_name("Take")
        .input_type("crate::TakeRequest")
        .output_type("crate::TakeReply")
        .codec_path("tonic_prost::ProstCodec")
        .build();
    let stock = Service::builder()
        .name("Stock")
        .package("shop")
        .method(take)
        .build();
    Builder::new().compile(&[stock]);
}
