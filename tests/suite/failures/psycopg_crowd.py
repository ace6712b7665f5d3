"""The half of the crowd that is another program: threads that write through the functions in Postgres.

    psycopg_crowd.py WRITERS DRAW LAST together|apart

Each thread draws tokens with the statement DRAW, up to LAST, from the database DATABASE_URL. The check and the
write are one transaction, or, apart, they are not. Prints how many writes were acknowledged and refused.
"""

import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import psycopg

writers, draw, last, check = sys.argv[1:]


def write(conn, token):
    with conn.transaction() if check == "together" else nullcontext():
        conn.execute("SELECT fence_admit('sku-1', %s)", [token])
        [n] = conn.execute("SELECT n FROM stock").fetchone()
        time.sleep(0.002)
        conn.execute("UPDATE stock SET n = %s", [n - 1])
        conn.execute("INSERT INTO writes VALUES (%s, %s)", [n - 1, token])


def writer(_):
    acknowledged = refused = 0
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as conn:
        while (token := conn.execute(draw).fetchone()[0]) <= int(last):
            # Some are late with their tokens.
            time.sleep(random.uniform(0, 0.003))
            try:
                write(conn, token)
                acknowledged += 1
            except psycopg.Error as error:
                if error.sqlstate != "TF412":
                    raise
                refused += 1
    return acknowledged, refused


with ThreadPoolExecutor(int(writers)) as pool:
    counts = list(pool.map(writer, range(int(writers))))
acknowledged, refused = map(sum, zip(*counts))
print(json.dumps({"acknowledged": acknowledged, "refused": refused}))
