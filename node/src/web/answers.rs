//! Answers of HTTP, as all of them are: done, or refused with the reason.
//!
//! **Not here**: what is answered (`api`), and line by line (`lines`).

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use dunlin_api::Answer;
use serde::Serialize;
use utoipa::ToSchema;

/// The request was carried out, or is under way.
#[derive(Serialize, ToSchema)]
pub struct Done {
    /// The result, as text for people.
    pub text: String,
}

/// The request was not carried out.
#[derive(Serialize, ToSchema)]
pub struct Refused {
    /// One line that says what to do.
    pub why: String,
    /// The exit code that a command would have: 2 for bad input, 1 for the rest.
    pub code: i32,
}

/// There is no place for another one.
pub fn busy() -> Response {
    let why = "too many requests are under way: say it again in a moment";
    later(refused(StatusCode::SERVICE_UNAVAILABLE, why, 1))
}

/// With when to come again.
pub fn later(mut response: Response) -> Response {
    response
        .headers_mut()
        .insert(RETRY_AFTER, HeaderValue::from_static("5"));
    response
}

/// A last answer.
pub fn said(answer: Answer) -> Response {
    match answer {
        Answer::Done { text } => Json(Done { text }).into_response(),
        Answer::Failed { why, code: 2 } => refused(StatusCode::BAD_REQUEST, &why, 2),
        Answer::Failed { why, code } => refused(StatusCode::CONFLICT, &why, code),
        _ => refused(StatusCode::CONFLICT, "the daemon answers something else", 1),
    }
}

/// A refusal, as all of them are.
pub fn refused(status: StatusCode, why: &str, code: i32) -> Response {
    let why = why.to_owned();
    (status, Json(Refused { why, code })).into_response()
}

/// Nobody carries it out any more.
pub fn ends() -> Response {
    refused(StatusCode::SERVICE_UNAVAILABLE, "this host's daemon ends", 1)
}
