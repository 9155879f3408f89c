//! The page and the JSON that it lives on, over the HTTP port and the Unix socket.

use mainstay_model::health::HealthState;
use serde_json::Value;
use tokio::net::{TcpStream, UnixStream};

use super::events::verdict;
use super::http::{get, raw, request};
use super::server::Server;

async fn answer(server: &Server, path: &str) -> (u16, Value) {
    let (status, text) = get(server, path).await;
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}")))
}

#[tokio::test]
async fn the_host_its_jobs_and_its_journal_are_read_as_json() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    server.health("host.memory", HealthState::Degraded);
    server.record(20, Some("demo"), verdict(1, "rank 1 was killed"));

    let (status, node) = answer(&server, "/v1/node").await;
    assert_eq!(
        (status, &node["node"]["state"], &node["server"]["hostname"]),
        (200, &"DEGRADED".into(), &"node-17".into())
    );
    let (_, devices) = answer(&server, "/v1/devices").await;
    assert_eq!(devices["devices"], Value::Array(vec![]));

    let (_, jobs) = answer(&server, "/v1/jobs").await;
    assert_eq!(
        (&jobs["jobs"][0]["id"], jobs["jobs"][0].get("ranks")),
        (&"demo".into(), None),
        "a list has no ranks"
    );
    let (_, job) = answer(&server, "/v1/jobs/demo").await;
    assert_eq!(job["job"]["ranks"].as_array().map(Vec::len), Some(2));

    let (_, all) = answer(&server, "/v1/events").await;
    let (_, rest) = answer(&server, "/v1/events?after=4&limit=1").await;
    assert_eq!(all["caught_up"], true);
    assert_eq!(all["events"].as_array().map(Vec::len), Some(5));
    assert_eq!((&rest["events"][0]["cursor"], &rest["caught_up"]), (&5.into(), &false.into()));
    let (_, some) = answer(&server, "/v1/events?job=demo&kind=verdict,decision&severity=warning").await;
    assert_eq!(some["events"].as_array().map(Vec::len), Some(1));
    assert_eq!(some["events"][0]["kind"], "VERDICT");

    let (status, incident) = answer(&server, "/v1/incidents/demo/1").await;
    assert_eq!((status, &incident["job"], &incident["incident"]), (200, &"demo".into(), &1.into()));
    assert!(
        incident["text"].as_str().is_some_and(|text| text.starts_with("rank 1 was killed")),
        "{incident}"
    );
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_answered_is_an_error_that_says_why() {
    let dir = testing::tempdir().unwrap();
    let mut server = Server::start(dir.path()).await;
    server.job("demo");
    let mut all = String::new();
    for (path, status) in [
        ("/v1/jobs/other", 404),
        ("/v1/incidents/demo/7", 404),
        ("/v1/incidents/demo/x", 400),
        ("/v1/events?after=x", 400),
        ("/v1/events?after=99", 409),
        ("/v1/events?kind=verdicts", 400),
        ("/v1/events?severity=bad", 400),
        ("/v1/events?since=1", 400),
    ] {
        let (answered, error) = answer(&server, path).await;
        assert_eq!(answered, status, "{path}: {error}");
        all.push_str(&format!("{path}: {}\n", error["error"].as_str().unwrap()));
    }
    testing::snapshot!("http", "errors of the JSON", all);
    let post = raw(TcpStream::connect(server.http).await.unwrap(), &request("POST", "/v1/jobs")).await;
    assert!(post.starts_with("HTTP/1.1 405"), "{post}");
    server.stop().await;
}

#[tokio::test]
async fn the_page_is_small_and_runs_nothing_of_others() {
    let dir = testing::tempdir().unwrap();
    let server = Server::start(dir.path()).await;
    let mut bytes = 0;
    for (path, kind) in [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")] {
        let over_tcp = raw(TcpStream::connect(server.http).await.unwrap(), &request("GET", path)).await;
        let on_socket = raw(UnixStream::connect(&server.socket).await.unwrap(), &request("GET", path)).await;
        for answer in [&over_tcp, &on_socket] {
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            let head = head.to_ascii_lowercase();
            assert!(
                head.starts_with("http/1.1 200") && head.contains(&format!("content-type: {kind}")),
                "{head}"
            );
            assert!(
                head.contains("content-security-policy: default-src 'none'; script-src 'self'"),
                "{head}"
            );
            assert!(
                !body.contains("http://") && !body.contains("https://"),
                "{path} has no address of others"
            );
            bytes += body.len();
        }
    }
    assert!((1000..=2 * 150_000).contains(&bytes), "{bytes}");
    server.stop().await;
}
