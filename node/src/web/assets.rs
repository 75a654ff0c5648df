//! The page's files, inside the executable.

use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

/// Address, kind and text of each.
const FILES: [(&str, &str, &str); 5] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    (
        "/page.css",
        "text/css; charset=utf-8",
        include_str!("page/page.css"),
    ),
    (
        "/page.js",
        "text/javascript; charset=utf-8",
        include_str!("page/page.js"),
    ),
    (
        "/charts.js",
        "text/javascript; charset=utf-8",
        include_str!("page/charts.js"),
    ),
    ("/icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
];

/// The file at an address, if there is one.
pub fn at(path: &str) -> Option<Response> {
    let (_, kind, text) = FILES.iter().find(|(address, ..)| *address == path)?;
    Some(([(CONTENT_TYPE, HeaderValue::from_static(kind))], *text).into_response())
}
