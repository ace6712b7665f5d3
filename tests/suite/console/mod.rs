//! The console, with and without a browser, and the playground of the example.

mod api;
mod browser;
mod chromium_names;
mod chromium_page;
mod chromium_playground;
mod chromium_reach;
mod feed;
mod protection;
mod service;
