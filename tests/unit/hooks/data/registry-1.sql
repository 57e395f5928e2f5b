BEGIN TRANSACTION;
CREATE TABLE attempts (
    delivery_id TEXT NOT NULL REFERENCES deliveries (id) ON DELETE CASCADE,
    at REAL NOT NULL,
    seconds REAL NOT NULL,
    status INTEGER,
    exit_status INTEGER,
    error TEXT,
    excerpt TEXT NOT NULL,
    is_replay INTEGER NOT NULL
) STRICT;
INSERT INTO "attempts" VALUES('000000000000000000000004',1700000002.0,0.1,200,NULL,NULL,'fine',0);
INSERT INTO "attempts" VALUES('000000000000000000000005',1700000003.0,0.1,500,NULL,NULL,'no',0);
INSERT INTO "attempts" VALUES('000000000000000000000006',1700000004.0,0.1,NULL,NULL,'no connection','',0);
CREATE TABLE deliveries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    webhook_id TEXT NOT NULL,
    message_id TEXT NOT NULL REFERENCES messages (id),
    subject TEXT NOT NULL,
    status TEXT NOT NULL,
    failed INTEGER NOT NULL DEFAULT 0,
    due_at REAL,
    created_at REAL NOT NULL,
    finished_at REAL,
    UNIQUE (webhook_id, message_id)
) STRICT;
INSERT INTO "deliveries" VALUES(1,'000000000000000000000004','000000000000000000000001','event-1','model:a','delivered',0,NULL,1700000001.0,1700000002.0);
INSERT INTO "deliveries" VALUES(2,'000000000000000000000005','000000000000000000000001','event-2','model:a','failed',1,NULL,1700000002.0,1700000003.0);
INSERT INTO "deliveries" VALUES(3,'000000000000000000000006','000000000000000000000001','event-3','model:a','waiting',1,1700000009.0,1700000003.0,NULL);
INSERT INTO "deliveries" VALUES(4,'000000000000000000000007','000000000000000000000003','event-3','model:a','waiting',0,1700000003.0,1700000003.0,NULL);
INSERT INTO "deliveries" VALUES(5,'000000000000000000000008','000000000000000000000001','event-4','model:a','waiting',0,NULL,1700000004.0,NULL);
INSERT INTO "deliveries" VALUES(6,'000000000000000000000009','000000000000000000000001','event-5','model:b','waiting',0,1700000005.0,1700000005.0,NULL);
INSERT INTO "deliveries" VALUES(7,'00000000000000000000000a','000000000000000000000002','event-6','model:a','dropped',0,NULL,1700000006.0,1700000007.0);
INSERT INTO "deliveries" VALUES(8,'00000000000000000000000b','000000000000000000000002','event-7','model:a','waiting',0,1700000007.0,1700000007.0,NULL);
CREATE TABLE folders (
    name TEXT PRIMARY KEY,
    sha TEXT NOT NULL,
    changed_at REAL NOT NULL
) STRICT;
INSERT INTO "folders" VALUES('lab/act','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa',1700000000.0);
CREATE TABLE held (webhook_id TEXT PRIMARY KEY) STRICT;
INSERT INTO "held" VALUES('000000000000000000000002');
CREATE TABLE messages (
    id TEXT PRIMARY KEY,
    type TEXT NOT NULL,
    subject TEXT NOT NULL,
    is_hub INTEGER NOT NULL,
    body TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
INSERT INTO "messages" VALUES('event-1','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":1}}',1700000001.0);
INSERT INTO "messages" VALUES('event-2','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":2}}',1700000002.0);
INSERT INTO "messages" VALUES('event-3','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":3}}',1700000003.0);
INSERT INTO "messages" VALUES('event-4','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":4}}',1700000004.0);
INSERT INTO "messages" VALUES('event-5','repo.content','model:b',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":5}}',1700000005.0);
INSERT INTO "messages" VALUES('event-6','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":6}}',1700000006.0);
INSERT INTO "messages" VALUES('event-7','repo.content','model:a',1,'{"event":{"action":"update","scope":"repo.content"},"repo":{"name":"lab/act","type":"model","number":7}}',1700000007.0);
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    url TEXT,
    job TEXT,
    watched TEXT NOT NULL,
    domains TEXT NOT NULL,
    secret TEXT,
    secrets TEXT NOT NULL,
    disabled TEXT NOT NULL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    exhausted INTEGER NOT NULL DEFAULT 0,
    CHECK ((url IS NULL) <> (job IS NULL))
) STRICT;
INSERT INTO "webhooks" VALUES('000000000000000000000001','http://127.0.0.1:9/hook',NULL,'[["model", "lab/act"]]','["repo"]','a-secret-of-some-length','{}','',1700000000.0,1700000000.0,0);
INSERT INTO "webhooks" VALUES('000000000000000000000002','http://127.0.0.1:9/held',NULL,'[["model", "lab/act"]]','["repo"]',NULL,'{}','suspended-after-failure',1700000000.0,1700000008.0,0);
INSERT INTO "webhooks" VALUES('000000000000000000000003',NULL,'retrain','[["model", "lab/act"]]','["repo"]',NULL,'{"HF_TOKEN": "hf_of_the_job"}','',1700000000.0,1700000000.0,0);
CREATE INDEX due ON deliveries (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX waiting ON deliveries (webhook_id, subject, number) WHERE status = 'waiting';
CREATE INDEX of_message ON deliveries (message_id);
CREATE INDEX finished ON deliveries (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX of_delivery ON attempts (delivery_id, at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('deliveries',8);
COMMIT;
PRAGMA user_version=1;
