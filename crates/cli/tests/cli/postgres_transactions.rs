//! A command that completes its task itself, by plain SQL in the transaction of its effect.

use std::fs;

use rustix::process::Signal;
use taskonce_testkit::postgres::Database;
use taskonce_testkit::{Program, eventually, shared};

use crate::harness::{Desk, PATIENCE, Said};

/// Locks the claim, has its effect, and completes: what a worker of another language does with its own driver.
const SCRIPT: &str = r#"
cat > task.sql <<'SQL'
begin;
select fence from taskonce.task where key = :'key' and claim = :'claim'::uuid and state = 1 for update \gset
insert into effect values (:'key');
\! echo $$ >> inside
select pg_sleep(:pause);
\if :completes
update taskonce.task
set state = 3, token = gen_random_uuid(), output = convert_to('{"charged": 17}', 'utf8'), output_type = 'application/json',
    written_at = clock_timestamp(), expires_at = clock_timestamp() + retention * interval '1 millisecond',
    output_until = clock_timestamp() + output_retention * interval '1 millisecond'
where key = :'key' and claim = :'claim'::uuid and state = 1;
commit;
\else
rollback;
\endif
SQL
"$PSQL" "$DATABASE" --no-psqlrc --quiet -v ON_ERROR_STOP=1 -v key="$TASKONCE_KEY" -v claim="$TASKONCE_CLAIM_ID" \
    -v completes="${COMPLETES:-yes}" -v pause="${PAUSE:-0}" -f task.sql >/dev/null || exit
sleep "${LINGER:-0}"
exit "${CODE:-0}"
"#;

struct Shop {
    desk: Desk,
    database: Database,
}

impl Shop {
    fn new() -> Shop {
        let database = shared::database().unwrap();
        let desk = Desk::over(&database.url());
        desk.script("task.sh", SCRIPT);
        assert_eq!(desk.say(&["migrate"]).code, 0);
        // Append-only: what is doubled shows.
        database.psql("create table effect (key text not null)").unwrap();
        Shop { desk, database }
    }

    fn args(&self, settings: &[&str]) -> Vec<String> {
        let psql = Program::Postgres.path().unwrap().with_file_name("psql");
        let words = ["run", "--key", "a", "--effect", "transactional", "--lease", "3s", "--", "env"];
        let mut args: Vec<String> = words.map(str::to_owned).to_vec();
        args.push("sh".into());
        args.push("-c".into());
        // The command is the payload, so that what differs between calls comes from files.
        args.push(". ./settings; . ./task.sh".into());
        let more = settings.iter().map(|setting| format!("export {setting}\n")).collect::<String>();
        let text = format!("export PSQL='{}' DATABASE='{}'\n{more}", psql.display(), self.database.url());
        fs::write(self.desk.path("settings"), text).unwrap();
        args
    }

    fn run(&self, settings: &[&str]) -> Said {
        let args = self.args(settings);
        self.desk.say(&args.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn effects(&self) -> String {
        self.database.psql("select count(*) from effect").unwrap()
    }

    fn state(&self) -> String {
        self.desk.say(&["show", "--json", "a"]).json()["state"].as_str().unwrap().to_owned()
    }
}

#[test]
fn a_command_completes_its_task_with_its_effect_and_a_duplicate_gets_what_its_sql_gave() {
    let shop = Shop::new();
    let first = shop.run(&[]);
    assert_eq!(first.code, 0, "{first:?}");
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("1", "done"));
    let second = shop.run(&[]);
    assert_eq!((second.code, second.text().as_str()), (0, "{\"charged\": 17}"), "{second:?}");
    assert_eq!(shop.effects(), "1");
}

#[test]
fn a_command_that_ends_well_without_completing_its_task_has_failed() {
    let shop = Shop::new();
    let forgot = shop.run(&["COMPLETES=no"]);
    assert_eq!(forgot.code, 1, "{forgot:?}");
    assert!(forgot.stderr.contains("it ended well without having completed its task"), "{}", forgot.stderr);
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("0", "waiting"));
    assert_eq!(shop.run(&[]).code, 0);
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("1", "done"));
}

#[test]
fn a_command_that_fails_leaves_no_effect_and_one_that_fails_behind_its_commit_is_done() {
    let shop = Shop::new();
    assert_eq!(shop.run(&["COMPLETES=no", "CODE=3"]).code, 3);
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("0", "waiting"));
    let done = shop.run(&["CODE=3"]);
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("1", "done"));
    assert_eq!(done.code, 0, "{done:?}");
}

/// Heartbeats come while the transaction holds the record, and after it has completed it.
#[test]
fn heartbeats_neither_disturb_the_transaction_nor_kill_a_command_that_has_completed() {
    let shop = Shop::new();
    let said = shop.run(&["PAUSE=1.3", "LINGER=1.3"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("1", "done"));
}

#[test]
fn a_command_killed_inside_its_transaction_leaves_nothing_and_runs_again() {
    let shop = Shop::new();
    // A server that is asleep does not see that its client is gone; until it wakes the task is busy.
    let args = shop.args(&["PAUSE=5"]);
    let call = shop.desk.start(&args.iter().map(String::as_str).collect::<Vec<_>>());
    shop.desk.await_lines("inside", 1);
    call.signal(Signal::KILL);
    call.end();
    let again = || shop.run(&[]).code == 0;
    assert!(eventually(PATIENCE, again), "{}", shop.state());
    assert_eq!((shop.effects().as_str(), shop.state().as_str()), ("1", "done"));
}

#[test]
fn a_store_that_a_command_cannot_join_is_refused_before_anything_runs() {
    let desk = Desk::new();
    let redis = Desk::over("redis://127.0.0.1:1");
    for (desk, text) in
        [(&desk, "many SQLite libraries lose data"), (&redis, "no transaction of yours can reach the records")]
    {
        let said = desk.say(&["run", "--key", "a", "--effect", "transactional", "--", "touch", "ran"]);
        assert_eq!(said.code, 78, "{said:?}");
        assert!(said.stderr.contains(text) && said.stderr.contains("hint: "), "{}", said.stderr);
        assert!(!desk.path("ran").exists());
    }
}
