//! What every request has to be before anything of it is done.
//!
//! **Decides**: whether it was meant for this host, by a page of this host, and from whom it is. **Flow**: [`check`] -> the role (`daemon::roles`) ->
//! the API. **Invariants**: 1. a name that is not this host's is refused, so that no other site's page speaks to it under a name of its own (DNS
//! rebinding). 2. what another site's page asks for is refused, but to open the page. 3. a request that changes something shows the token that only
//! a page of this host, or a program of this user's, can have read; by the socket, which no page can reach, there is none. 4. every answer carries [`HEADERS`].
//! **Source**: Fetch Metadata Request Headers, RFC 6454. **Not here**: whose connection it is (`owner`).

use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode};

/// The header with the token.
pub const TOKEN: &str = "x-dunlin-token";

/// Nothing from elsewhere is loaded, nothing of a text is executed, nobody frames it, nobody keeps it.
pub const HEADERS: [(&str, &str); 8] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("permissions-policy", "camera=(), microphone=(), geolocation=()"),
    ("cache-control", "no-store"),
];

/// Why not, in a line.
pub type Refusal = (StatusCode, String);

/// Whether a request was meant for this host, and comes from a page of its own or from no page at all.
pub fn check(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    names: &[String],
    token: Option<&str>,
) -> Result<(), Refusal> {
    let host = is_for_us(headers, names)?;
    let changes = !matches!(*method, Method::GET | Method::HEAD);
    let word = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let forbidden = |why: &str| Err((StatusCode::FORBIDDEN, why.to_owned()));
    match word("sec-fetch-site") {
        None | Some("same-origin" | "none") => {}
        // A link to the page, or its address in another page's link.
        Some(_) if !changes && path == "/" && word("sec-fetch-mode") == Some("navigate") => {}
        Some(_) => return forbidden("a page of another site asks for this"),
    }
    if let Some(origin) = headers.get(ORIGIN) {
        let own = origin
            .to_str()
            .ok()
            .and_then(|origin| origin.split_once("://"))
            .is_some_and(|(scheme, rest)| {
                matches!(scheme, "http" | "https") && rest.eq_ignore_ascii_case(host.as_str())
            });
        if !own {
            return forbidden("a page of another site asks for this");
        }
    }
    if changes && token.is_some() && word(TOKEN) != token {
        return forbidden(
            "a request that changes something shows in the header X-Dunlin-Token what /api/v1/me says",
        );
    }
    Ok(())
}

fn is_for_us(headers: &HeaderMap, names: &[String]) -> Result<Authority, Refusal> {
    let mut given = headers.get_all(HOST).iter();
    let host = match (given.next(), given.next()) {
        (Some(host), None) => host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()),
        _ => None,
    };
    let Some(host) = host else {
        return Err((StatusCode::BAD_REQUEST, "a request names one host".to_owned()));
    };
    let name = host.host().trim_start_matches('[').trim_end_matches(']');
    match names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
        true => Ok(host),
        false => Err((
            StatusCode::MISDIRECTED_REQUEST,
            format!("this is not '{}': it is called '{}'", printable(name), names[0]),
        )),
    }
}

/// A name from outside, in an answer.
fn printable(name: &str) -> String {
    name.chars().filter(char::is_ascii_graphic).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn asked(method: Method, path: &str, headers: &[(&str, &str)]) -> Result<(), StatusCode> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().expect("a name");
            map.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        let names = ["localhost".to_owned(), "127.0.0.1".to_owned(), "::1".to_owned()];
        check(&method, path, &map, &names, Some("secret")).map_err(|(status, _)| status)
    }

    #[test]
    fn only_names_of_this_host_are_answered() {
        for good in [
            "localhost",
            "LOCALHOST:7702",
            "127.0.0.1:9",
            "[::1]:7702",
            "localhost:7702",
        ] {
            assert_eq!(
                asked(Method::GET, "/api/v1/me", &[("host", good)]),
                Ok(()),
                "{good}"
            );
        }
        for wrong in [
            "evil.example:7702",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "0.0.0.0",
            "localhost@evil.example",
        ] {
            let asked = asked(Method::GET, "/", &[("host", wrong)]);
            assert_eq!(asked, Err(StatusCode::MISDIRECTED_REQUEST), "{wrong}");
        }
        for headers in [
            &[][..],
            &[("host", "")],
            &[("host", "localhost"), ("host", "evil.example")],
        ] {
            assert_eq!(
                asked(Method::GET, "/", headers),
                Err(StatusCode::BAD_REQUEST),
                "{headers:?}"
            );
        }
    }

    #[test]
    fn another_site_s_page_opens_the_page_and_nothing_else() {
        let of = |method: Method, path: &str, more: &[(&str, &str)]| {
            let headers = [&[("host", "localhost:7702")], more].concat();
            asked(method, path, &headers)
        };
        let token = ("x-dunlin-token", "secret");
        let down = "/api/v1/vms/shop/down";
        for site in ["cross-site", "same-site"] {
            let site = ("sec-fetch-site", site);
            let opens = [site, ("sec-fetch-mode", "navigate")];
            assert_eq!(of(Method::GET, "/", &opens), Ok(()));
            assert_eq!(
                of(Method::GET, "/api/v1/overview", &opens),
                Err(StatusCode::FORBIDDEN)
            );
            assert_eq!(
                of(Method::POST, "/", &[site, ("sec-fetch-mode", "navigate"), token]),
                Err(StatusCode::FORBIDDEN)
            );
            assert_eq!(
                of(Method::GET, "/", &[site, ("sec-fetch-mode", "cors")]),
                Err(StatusCode::FORBIDDEN)
            );
        }
        for origin in [
            "https://evil.example",
            "null",
            "http://localhost:9",
            "file://localhost:7702",
            "localhost:7702",
        ] {
            let headers = [("origin", origin), token];
            assert_eq!(
                of(Method::POST, down, &headers),
                Err(StatusCode::FORBIDDEN),
                "{origin}"
            );
        }
        let own = [
            ("origin", "http://localhost:7702"),
            ("sec-fetch-site", "same-origin"),
            token,
        ];
        assert_eq!(of(Method::POST, down, &own), Ok(()));
    }

    #[test]
    fn a_change_shows_the_token() {
        for method in [Method::POST, Method::DELETE, Method::PUT, Method::OPTIONS] {
            let host = ("host", "localhost");
            assert_eq!(asked(method.clone(), "/x", &[host]), Err(StatusCode::FORBIDDEN));
            let wrong = [host, ("x-dunlin-token", "secre")];
            assert_eq!(asked(method.clone(), "/x", &wrong), Err(StatusCode::FORBIDDEN));
            assert_eq!(asked(method, "/x", &[host, ("x-dunlin-token", "secret")]), Ok(()));
        }
    }
}
