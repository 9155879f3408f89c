//! The page for people at `/`: static files without a build step, which live on the JSON of `/v1`. With the answers
//! inlined, the same page is the report on a job that is over.

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use serde_json::{Map, Value};

const HTML: &str = include_str!("page/page.html");
const CSS: &str = include_str!("page/page.css");
const JS: &str = include_str!("page/page.js");

/// Only files of this server run and style the page, it asks only this server, and no other site may embed it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The same where all is in the file: what it shows is put in as text, never as markup.
const POLICY_INLINED: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; \
     form-action 'none'";

/// What the document has in place of the two files.
const LINKS: &str = "<link rel=\"stylesheet\" href=\"page.css\">\n<script src=\"page.js\" defer></script>\n";

pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let file = |content_type: &'static str, text: &'static str| {
        get(async move || {
            let headers = [
                (header::CONTENT_TYPE, content_type),
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::CACHE_CONTROL, "no-cache"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            ];
            (headers, text).into_response()
        })
    };
    Router::new()
        .route("/", file("text/html; charset=utf-8", HTML))
        .route("/page.css", file("text/css; charset=utf-8", CSS))
        .route("/page.js", file("text/javascript; charset=utf-8", JS))
}

/// The page in one file, with the answers that it would get, by path: `v1/node`.
pub fn inlined(answers: &Map<String, Value>) -> String {
    // No text of an answer can end the script element that holds it.
    let answers = Value::Object(answers.clone()).to_string().replace('<', "\\u003c");
    let all = format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY_INLINED}\">\n<style>\n{CSS}</style>\n\
         <script type=\"application/json\" id=\"answers\">{answers}</script>\n\
         <script type=\"module\">\n{JS}</script>\n"
    );
    HTML.replace(LINKS, &all)
}
