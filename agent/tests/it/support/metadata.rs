//! A metadata server like Google Compute Engine's: keys with etags, and answers that are delayed until a key
//! changes.
#![allow(
    clippy::unwrap_used,
    dead_code,
    reason = "a panic is how a test reports; not every test uses all of it"
)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// How it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// As it should.
    Well,
    /// It accepts requests and does not answer.
    Mute,
    /// Status 503.
    Unavailable,
    /// It breaks connections.
    Resets,
    /// It is another program: it answers 200 without the header that identifies Google's server.
    SomethingElse,
}

struct State {
    keys: BTreeMap<&'static str, String>,
    /// Counts changes; the etag of every key.
    version: u64,
    mood: Mood,
    /// The requests, by path and query.
    asked: Vec<String>,
    gone: bool,
}

/// The server; it ends when this is dropped.
pub struct Metadata {
    pub address: String,
    shared: Arc<(Mutex<State>, Condvar)>,
}

impl Metadata {
    /// Nothing is announced.
    pub fn start() -> Metadata {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let keys = [
            ("instance/maintenance-event", "NONE".to_owned()),
            ("instance/preempted", "FALSE".to_owned()),
            (
                "instance/upcoming-maintenance",
                r#"{ "error": "no notifications have been received yet, try again later" }"#.to_owned(),
            ),
        ];
        let state = State { keys: keys.into(), version: 1, mood: Mood::Well, asked: Vec::new(), gone: false };
        let shared = Arc::new((Mutex::new(state), Condvar::new()));
        let serving = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if serving.0.lock().unwrap().gone {
                    return;
                }
                let serving = serving.clone();
                std::thread::spawn(move || drop(answer(stream.unwrap(), &serving)));
            }
        });
        Metadata { address, shared }
    }

    pub fn set(&self, key: &'static str, value: &str) {
        self.change(|state| drop(state.keys.insert(key, value.to_owned())));
    }

    pub fn remove(&self, key: &'static str) {
        self.change(|state| drop(state.keys.remove(key)));
    }

    pub fn mood(&self, mood: Mood) {
        self.change(|state| state.mood = mood);
    }

    /// The requests so far.
    pub fn asked(&self) -> Vec<String> {
        self.shared.0.lock().unwrap().asked.clone()
    }

    /// Waits until a request contains these words.
    pub fn wait_until_asked(&self, words: &str) {
        let mut state = self.shared.0.lock().unwrap();
        while !state.asked.iter().any(|asked| asked.contains(words)) {
            state = self.shared.1.wait(state).unwrap();
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.shared.0.lock().unwrap();
        change(&mut state);
        state.version += 1;
        self.shared.1.notify_all();
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        self.change(|state| state.gone = true);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect(&self.address);
    }
}

fn answer(stream: TcpStream, shared: &(Mutex<State>, Condvar)) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    // All headers are read before it answers.
    let headers: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let flavored = headers.iter().any(|line| line.eq_ignore_ascii_case("Metadata-Flavor: Google"));
    let asked = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let (path, query) = asked.split_once('?').unwrap_or((&asked, ""));
    let of = |name: &str| {
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
    };
    let mut state = shared.0.lock().unwrap();
    state.asked.push(asked.clone());
    shared.1.notify_all();
    if of("wait_for_change").as_deref() == Some("true") {
        let longest = Duration::from_secs(of("timeout_sec").unwrap().parse().unwrap());
        let etag = of("last_etag");
        let same = |state: &mut State| etag == Some(state.version.to_string()) && !state.gone;
        state = shared.1.wait_timeout_while(state, longest, same).unwrap().0;
    }
    let mut stream = stream;
    let key = path.strip_prefix("/computeMetadata/v1/").unwrap_or_default().to_owned();
    let (version, mood) = (state.version, state.mood);
    let value = state.keys.get(key.as_str()).cloned();
    drop(state);
    let mut say = |status: &str, headers: &str, body: &str| {
        write!(stream, "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len())
    };
    let google = format!("Metadata-Flavor: Google\r\nETag: {version}\r\n");
    match (mood, value) {
        (Mood::Well, _) if !flavored => {
            say("403 Forbidden", &google, "Missing Metadata-Flavor:Google header.")?
        }
        (Mood::Well, Some(value)) => say("200 OK", &google, &value)?,
        (Mood::Well, None) => say("404 Not Found", &google, "not found")?,
        (Mood::Unavailable, _) => say("503 Service Unavailable", &google, "try again")?,
        (Mood::SomethingElse, _) => say("200 OK", "", "<html>welcome</html>")?,
        (Mood::Mute, _) => {
            let state = shared.0.lock().unwrap();
            drop(shared.1.wait_while(state, |state| state.mood == Mood::Mute && !state.gone).unwrap());
        }
        // Unread input makes the kernel answer with a reset.
        (Mood::Resets, _) => {}
    }
    Ok(())
}
