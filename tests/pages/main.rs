//! The console and the playground, in a browser and without one.

mod api;
mod browser;
mod chromium_names;
mod chromium_page;
mod chromium_playground;
mod chromium_reach;
mod feed;
mod protection;
mod service;

#[macro_use]
extern crate tower_fence_tests as support;
