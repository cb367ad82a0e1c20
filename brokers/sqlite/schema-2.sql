-- Step 2 of the schema of a taskonce queue: what a program does not know how to read it leaves to a newer one.

ALTER TABLE delivery ADD COLUMN format INTEGER NOT NULL DEFAULT 1; -- of the row: a program that knows only smaller ones puts it off
