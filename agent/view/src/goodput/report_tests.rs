use mainstay_model::time::Span;
use mainstay_proto::v1::{Books, TimeCause, TimeInState};

use super::*;

fn time(state: TimeCategory, cause: Option<u32>, seconds: u64) -> TimeInState {
    TimeInState {
        state: state.as_str().to_owned(),
        cause,
        time: Some(convert::duration(Span::seconds(seconds))),
        rank_seconds: 8.0 * seconds as f64,
    }
}

fn accounts() -> [JobAccount; 2] {
    let hang = TimeCause {
        kind: "hang".to_owned(),
        headline: "rank 3 hangs in all_reduce".to_owned(),
        host: Some("node-7".to_owned()),
        incident: Some(1),
        time: Some(convert::timestamp(Wall(1_767_225_600_000_000_000))),
        detected_after: Some(convert::duration(Span::seconds(290))),
        recovered_after: Some(convert::duration(Span::seconds(330))),
        lost_steps: 54,
    };
    let books = Books {
        times: vec![
            time(TimeCategory::Training, None, 86_400),
            time(TimeCategory::Checkpointing, None, 600),
            time(TimeCategory::LostWork, Some(0), 270),
            time(TimeCategory::Undetected, Some(0), 290),
            time(TimeCategory::Starting, None, 40),
            time(TimeCategory::Initialising, Some(0), 30),
        ],
        causes: vec![hang],
        steps: 17_280,
        launches: 1,
        measured: true,
        counted: false,
    };
    let silent =
        Books { times: vec![time(TimeCategory::Unmeasured, None, 3600)], launches: 2, ..Books::default() };
    let account = |job: &str, books| JobAccount {
        job: job.to_owned(),
        user: "ada".to_owned(),
        hosts: Vec::new(),
        ranks: 8,
        books,
    };
    [account("exp-7", books), account("=silent, \"one\"", silent)]
}

#[test]
fn the_report_for_people() {
    let jobs = accounts();
    let options = Options { by: None, price: None, window: (None, None) };
    let whole = text(&jobs, options);
    let by_cause = text(&jobs, Options { by: Some(GroupBy::Cause), price: Some(2.5), ..options });
    let by_host = text(&jobs, Options { by: Some(GroupBy::Host), ..options });
    testing::snapshot!("view", "goodput", format!("{whole}\n{by_cause}\n{by_host}"));
}

#[test]
fn rows_for_a_spreadsheet_are_quoted_and_no_formulas() {
    let jobs = accounts();
    let csv = csv(&jobs, Options { by: None, price: Some(3600.0), window: (None, None) });
    let rows: Vec<&str> = csv.lines().collect();
    assert_eq!(rows.len(), 1 + 7);
    assert_eq!(rows[3], "exp-7,ada,lost_work,hang,node-7,1,270.000,0.600000,54,2160.00");
    assert_eq!(rows[7], "\"'=silent, \"\"one\"\"\",ada,unmeasured,,,,3600.000,8.000000,,28800.00");
}

#[test]
fn what_is_unknown_is_null() {
    let jobs = accounts();
    let value = json(&jobs, Options { by: None, price: None, window: (None, None) });
    let (known, silent) = (&value["jobs"][0], &value["jobs"][1]);
    assert_eq!(
        (&silent["goodput"], &silent["mttf_seconds"], &silent["cost"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    assert_eq!(known["goodput"], 86_400.0 / 87_630.0);
    assert_eq!(known["ettr"], 87_000.0 / 87_630.0);
    assert_eq!(known["mttf_seconds"], 87_270.0);
    assert_eq!(value["total"]["lost_steps"], 54);
}
