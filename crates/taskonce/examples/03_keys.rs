//! Who is the same task: keys from chosen fields of the input, the same in every language.

#![allow(clippy::print_stdout, reason = "an example shows what happens")]

use taskonce::{Fields, Handler, Input};

fn main() -> taskonce::Result<()> {
    let handler = Handler::within("shop", "ship", "1")?;
    let fields = Fields::new(["/order/id"])?;

    // Another order of members, another `sent_at`, `7.0` for `7`: the same task.
    let first = Input::from_json(br#"{"order": {"id": 7}, "sent_at": "10:00"}"#)?;
    let again = Input::from_json(br#"{"sent_at": "10:05", "order": {"id": 7.0}}"#)?;
    let first = handler.task_from(&first, &fields)?;
    println!("{}", first.key);
    println!("same: {}", first == handler.task_from(&again, &fields)?);

    // A new version of the handler makes new tasks.
    let next =
        Handler::within("shop", "ship", "2")?.task_from(&Input::from_json(br#"{"order": {"id": 7}}"#)?, &fields)?;
    println!("same under a new version: {}", first.key == next.key);

    // What has two readings is refused, with its place.
    for bad in [r#"{"order": {"id": 7, "id": 8}}"#, r#"{"order": {"id": 99999999999999999999}}"#, r#"{"order": {}}"#] {
        let refused = Input::from_json(bad.as_bytes()).and_then(|input| handler.task_from(&input, &fields).map(drop));
        if let Err(error) = refused {
            println!("{}: {}", error.kind().name(), error.subject().unwrap_or(""));
        }
    }
    Ok(())
}

// Output:
// shop/ship@1/3dc7477d9ca867c2eae4607c714bed69a5e5e422
// same: true
// same under a new version: false
// duplicate_name: /order/id
// integer_range: /order/id
// pointer_missing: /order/id
